/* The stand-in nvidia-smi: -q and -q -x, from one layout. Labels and their order: -q of 535.129.03 (a public log),
 * of 590.48.01 and 595.80 (captures of utkuozdemir/nvidia_gpu_exporter). Elements: -q -x of 535.54.03
 * (influxdata/telegraf), of 570.148, 580.105 and 595.91 (captures of NVIDIA/k8s-test-infra). */
#include "smi.h"

#include <strings.h>
#include <time.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" /* of the tables: what is left out is 0 */

/* What has an empty label is in XML only (what is below it is less deep in text); what has no element, in text only.
 * After '|' is the label from 580 on. A row that has rows below it is a heading; where its field has no value, it
 * shows that in their place. */
typedef struct {
    int depth;
    const char *label, *element;
    const char *field;   /* of smi_fields.c; a constant after '=', a writer after '@' */
    const char *section; /* of -d */
    int since, until;    /* branches, `until` not included */
    const char *when;    /* "?field" has a value, "!field" has none, "-": -d asks for it */
} row;

#define TOTAL_USED_FREE(depth, function)                                                                              \
    {depth, "Total", "total", "#l " function " 0 0 - MiB"}, {depth, "Used", "used", "#l " function " 2 0 - MiB"},      \
        {depth, "Free", "free", "#l " function " 1 0 - MiB"}
#define REASON(label, what) {2, label, "clocks_event_reason_" what, "clocks_event_reasons." what}
#define COUNTER(label, element, what)                                                                                 \
    {2, label, "clocks_event_reasons_counters_" element, "clocks_event_reasons_counters." what}
#define ERRORS(kind)                                                                                                  \
    {3, "SRAM Correctable", "sram_correctable", "ecc.errors.corrected." kind ".sram"},                                 \
        {3, "SRAM Uncorrectable", "sram_uncorrectable", "ecc.errors.uncorrected." kind ".sram", 0, 0, 0, "!sram"},     \
        {3, "SRAM Uncorrectable Parity", "sram_uncorrectable_parity",                                                 \
         "ecc.errors.uncorrected." kind ".sram.parity", 0, 0, 0, "?sram"},                                               \
        {3, "SRAM Uncorrectable SEC-DED", "sram_uncorrectable_secded",                                                \
         "ecc.errors.uncorrected." kind ".sram.secded", 0, 0, 0, "?sram"},                                               \
        {3, "DRAM Correctable", "dram_correctable", "ecc.errors.corrected." kind ".dram"},                             \
        {3, "DRAM Uncorrectable", "dram_uncorrectable", "ecc.errors.uncorrected." kind ".dram"}
#define SOURCE(label, element, what) {3, "SRAM " label, "sram_" element, "ecc.errors.uncorrected.aggregate.sram." what}
#define HISTOGRAM(label, what, n) {3, label, "row_remapper_histogram_" what, "#n RowRemapperHistogram " #n " 0 - bank(s)"}
#define TLIMIT(label, what, number)                                                                                   \
    {2, label " T.Limit Temp", "gpu_temp_" what "_tlimit_threshold", "#f - " #number " 0 - C", 0, 0, 0, "?#f - 193"}
#define THRESHOLD(label, what, number)                                                                                \
    {2, label " Temp", "gpu_temp_" what "_threshold", "#t TemperatureThreshold " #number " 0 - C", 0, 0, 0, "!#f - 193"}
#define POWER(label, element, field) {2, label " Power Limit", element "_power_limit", field}
#define CEILING(label, element, field)                                                                                \
    {2, label " Power Limit", element "_power_limit", field, 0, 0, 610}, {2, "", element "_power_limit", field, 0, 610}
#define CLOCKS(label, element, name)                                                                                  \
    {1, label, element, 0, "CLOCK"}, {2, "Graphics", "graphics_clock", name ".graphics"}
#define PLATFORM(label, what) {2, label, what, "known.platform." what}
#define HEALTH(label, what) {3, label, what, "fabric.health." what}

static const row layout[] = {
    {1, "Product Name", "product_name", "name"},
    {1, "Product Brand", "product_brand", "brand"},
    {1, "Product Architecture", "product_architecture", "architecture"},
    {1, "Display Mode", "display_mode", "display_mode"},
    {1, "Display Attached", "display_attached", "display_attached", 0, 580},
    {1, "Display Active", "display_active", "display_active"},
    {1, "Persistence Mode", "persistence_mode", "persistence_mode"},
    {1, "Addressing Mode", "addressing_mode", "addressing_mode"},
    {1, "MIG Mode", "mig_mode"},
    {2, "Current", "current_mig", "mig.mode.current"},
    {2, "Pending", "pending_mig", "mig.mode.pending"},
    {1, "", "mig_devices", "@mig"},
    {1, "Accounting Mode", "accounting_mode", "accounting.mode", "ACCOUNTING"},
    {1, "Accounting Mode Buffer Size", "accounting_mode_buffer_size", "accounting.buffer_size", "ACCOUNTING"},
    {1, "Driver Model", "driver_model"},
    {2, "Current", "current_dm", "driver_model.current"},
    {2, "Pending", "pending_dm", "driver_model.pending"},
    {1, "Serial Number", "serial", "serial"},
    {1, "GPU UUID", "uuid", "uuid"},
    {1, "GPU PDI", "pdi", "#l Pdi 1 0x01000010 0x%016llx", 0, 580},
    {1, "Minor Number", "minor_number", "#n MinorNumber"},
    {1, "VBIOS Version", "vbios_version", "vbios_version"},
    {1, "MultiGPU Board", "multigpu_board", "#n MultiGpuBoard 0 0 No|Yes"},
    {1, "Board ID", "board_id", "#n BoardId 0 0 0x%llx"},
    {1, "Board Part Number", "board_part_number", "#s BoardPartNumber 80"},
    {1, "GPU Part Number", "gpu_part_number", "=N/A"}, /* not in NVML */
    {1, "FRU Part Number", "gpu_fru_part_number", "=N/A"},
    {1, "Module ID", "gpu_module_id", "platform.module_id", 0, 0, 570},
    {1, "Platform Info", "platformInfo", 0, 0, 570},
    PLATFORM("Chassis Serial Number", "chassis_serial_number"),
    PLATFORM("Slot Number", "slot_number"),
    PLATFORM("Tray Index", "tray_index"),
    PLATFORM("Host ID", "host_id"),
    PLATFORM("Peer Type", "peer_type"),
    {2, "Module Id", "module_id", "platform.module_id"},
    PLATFORM("GPU Fabric GUID", "gpu_fabric_guid"),
    {1, "Inforom Version", "inforom_version"},
    {2, "Image Version", "img_version", "inforom.img"},
    {2, "OEM Object", "oem_object", "inforom.oem"},
    {2, "ECC Object", "ecc_object", "inforom.ecc"},
    {2, "Power Management Object", "pwr_object", "inforom.pwr"},
    {1, "Inforom BBX Object Flush", "inforom_bbx_flush"},
    {2, "Latest Timestamp", "latest_timestamp", "flush.time"},
    {2, "Latest Duration", "latest_duration", "flush.duration"},
    {1, "Inforom Time Data", 0, 0, 0, 610},
    {2, "Time Run", 0, "bbx.time_run"},
    {1, "GPU Operation Mode", "gpu_operation_mode"},
    {2, "Current", "current_gom", "gom.current"},
    {2, "Pending", "pending_gom", "gom.pending"},
    {1, "GSP Firmware Version", "gsp_firmware_version", "#s GspFirmwareVersion 64", "GSP_FIRMWARE_VERSION", 0, 570},
    {1, "GPU C2C Mode", "c2c_mode", "c2c.mode", 0, 550},
    {1, "GPU Virtualization Mode", "gpu_virtualization_mode"},
    {2, "Virtualization Mode", "virtualization_mode", "virtualization"},
    {2, "Host VGPU Mode", "host_vgpu_mode", "host_vgpu"},
    {2, "vGPU Heterogeneous Mode", "vgpu_heterogeneous_mode", "=N/A", 0, 550},
    {1, "GPU Reset Status", "gpu_reset_status", 0, "RESET_STATUS", 0, 580},
    {2, "Reset Required", "reset_required", "reset_status.reset_required"},
    {2, "Drain and Reset Recommended", "drain_and_reset_recommended", "reset_status.drain_and_reset_recommended"},
    {1, "GPU Recovery Action", "gpu_recovery_action", "gpu_recovery_action", 0, 570},
    {1, "GSP Firmware Version", "gsp_firmware_version", "#s GspFirmwareVersion 64", "GSP_FIRMWARE_VERSION", 570},
    {1, "IBMNPU", "ibmnpu"},
    {2, "Relaxed Ordering Mode", "relaxed_ordering_mode", "=N/A"},
    {1, "PCI", "pci"},
    {2, "Bus", "pci_bus", "pci.bus"},
    {2, "Device", "pci_device", "pci.device"},
    {2, "Domain", "pci_domain", "pci.domain"},
    {2, "Base Classcode", "pci_base_class", "pci.baseClass", 0, 550},
    {2, "Sub Classcode", "pci_sub_class", "pci.subClass", 0, 550},
    {2, "Device Id", "pci_device_id", "pci.device_id"},
    {2, "Bus Id", "pci_bus_id", "pci.bus_id"},
    {2, "Sub System Id", "pci_sub_system_id", "pci.sub_device_id"},
    {2, "GPU Link Info", "pci_gpu_link_info"},
    {3, "PCIe Generation", "pcie_gen"},
    {4, "Max", "max_link_gen", "pcie.link.gen.max"},
    {4, "Current", "current_link_gen", "pcie.link.gen.current"},
    {4, "Device Current", "device_current_link_gen", "pcie.link.gen.gpucurrent"},
    {4, "Device Max", "max_device_link_gen", "pcie.link.gen.gpumax"},
    {4, "Host Max", "max_host_link_gen", "pcie.link.gen.hostmax"},
    {3, "Link Width", "link_widths"},
    {4, "Max", "max_link_width", "#n MaxPcieLinkWidth 0 0 %lldx"},
    {4, "Current", "current_link_width", "#n CurrPcieLinkWidth 0 0 %lldx"},
    {2, "Bridge Chip", "pci_bridge_chip"},
    {3, "Type", "bridge_chip_type", "=N/A"}, /* of boards of two GPUs, none of which EC2 has */
    {3, "Firmware", "bridge_chip_fw", "=N/A"},
    {2, "Replays Since Reset", "replay_counter", "#n PcieReplayCounter"},
    {2, "Replay Number Rollovers", "replay_rollover_counter", "#f - 95"},
    {2, "Tx Throughput", "tx_util", "#t PcieThroughput 0 0 - KB/s"},
    {2, "Rx Throughput", "rx_util", "#t PcieThroughput 1 0 - KB/s"},
    {2, "Atomic Caps Inbound", "atomic_caps_inbound", "atomics.inbound", 0, 0, 570},
    {2, "Atomic Caps Outbound", "atomic_caps_outbound", "atomics.outbound"},
    {2, "Atomic Caps Inbound", "atomic_caps_inbound", "atomics.inbound", 0, 570},
    {1, "Fan Speed", "fan_speed", "fan.speed"},
    {1, "Performance State", "performance_state", "pstate", "PERFORMANCE"},
    {1, "Clocks Event Reasons", "clocks_event_reasons", 0, "PERFORMANCE"},
    REASON("Idle", "gpu_idle"),
    REASON("Applications Clocks Setting", "applications_clocks_setting"),
    REASON("SW Power Cap", "sw_power_cap"),
    REASON("HW Slowdown", "hw_slowdown"),
    REASON("    HW Thermal Slowdown", "hw_thermal_slowdown"),
    REASON("    HW Power Brake Slowdown", "hw_power_brake_slowdown"),
    REASON("Sync Boost", "sync_boost"),
    REASON("SW Thermal Slowdown", "sw_thermal_slowdown"),
    {2, "Display Clock Setting", "clocks_event_reason_display_clocks_setting", "display_clocks"},
    {1, "Clocks Event Reasons Counters", "clocks_event_reasons_counters", 0, "PERFORMANCE", 580},
    COUNTER("SW Power Capping", "sw_power_cap", "sw_power_cap"),
    COUNTER("Sync Boost", "sync_boost", "sync_boost"),
    COUNTER("SW Thermal Slowdown", "sw_therm_slowdown", "sw_thermal_slowdown"),
    COUNTER("HW Thermal Slowdown", "hw_therm_slowdown", "hw_thermal_slowdown"),
    COUNTER("HW Power Braking", "hw_power_brake", "hw_power_brake_slowdown"),
    {1, "Sparse Operation Mode", "sparse_operation_mode", "=N/A", 0, 550},
    {1, "FB Memory Usage", "fb_memory_usage", 0, "MEMORY"},
    {2, "Total", "total", "memory.total"},
    {2, "Reserved", "reserved", "memory.reserved"},
    {2, "Used", "used", "memory.used"},
    {2, "Free", "free", "memory.free"},
    {1, "BAR1 Memory Usage", "bar1_memory_usage", 0, "MEMORY"},
    TOTAL_USED_FREE(2, "BAR1MemoryInfo"),
    {1, "Conf Compute Protected Memory Usage", "cc_protected_memory_usage", 0, "MEMORY"},
    TOTAL_USED_FREE(2, "ConfComputeProtectedMemoryUsage"),
    {1, "Compute Mode", "compute_mode", "compute_mode", "COMPUTE"},
    {1, "Utilization", "utilization", 0, "UTILIZATION"},
    {2, "Gpu|GPU", "gpu_util", "utilization.gpu"},
    {2, "Memory", "memory_util", "utilization.memory"},
    {2, "Encoder", "encoder_util", "utilization.encoder"},
    {2, "Decoder", "decoder_util", "utilization.decoder"},
    {2, "JPEG", "jpeg_util", "utilization.jpeg"},
    {2, "OFA", "ofa_util", "utilization.ofa"},
    {1, "GPU Utilization Samples", 0, "@samples 1 %", "UTILIZATION", 0, 0, "-"},
    {1, "Memory Utilization Samples", 0, "@samples 2 %", "UTILIZATION", 0, 0, "-"},
    {1, "ENC Utilization Samples", 0, "@samples 3 %", "UTILIZATION", 0, 0, "-"},
    {1, "DEC Utilization Samples", 0, "@samples 4 %", "UTILIZATION", 0, 0, "-"},
    {1, "Encoder Stats", "encoder_stats", 0, "ENCODER_STATS"},
    {2, "Active Sessions", "session_count", "encoder.stats.sessionCount"},
    {2, "Average FPS", "average_fps", "encoder.stats.averageFps"},
    {2, "Average Latency", "average_latency", "encoder.stats.averageLatency"},
    {1, "FBC Stats", "fbc_stats", 0, "FBC_STATS"},
    {2, "Active Sessions", "session_count", "#n FBCStats 0"},
    {2, "Average FPS", "average_fps", "#n FBCStats 1"},
    {2, "Average Latency", "average_latency", "#n FBCStats 2"},
    {1, "DRAM Encryption Mode", "dram_encryption_mode", 0, "ECC", 570},
    {2, "Current", "current_dram_encryption", "dramEncryption.mode.current"},
    {2, "Pending", "pending_dram_encryption", "dramEncryption.mode.pending"},
    {1, "ECC Mode", "ecc_mode", 0, "ECC"},
    {2, "Current", "current_ecc", "ecc.mode.current"},
    {2, "Pending", "pending_ecc", "ecc.mode.pending"},
    {1, "ECC Errors", "ecc_errors", 0, "ECC"},
    {2, "Volatile", "volatile"},
    ERRORS("volatile"),
    {2, "Aggregate", "aggregate"},
    ERRORS("aggregate"),
    {3, "SRAM Threshold Exceeded", "sram_threshold_exceeded",
     "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded", 0, 0, 0, "?sram"},
    {2, "Aggregate Uncorrectable SRAM Sources", "aggregate_uncorrectable_sram_sources", 0, 0, 0, 0, "?sram"},
    SOURCE("L2", "l2", "l2"),
    SOURCE("SM", "sm", "sm"),
    SOURCE("Microcontroller", "microcontroller", "mcu"),
    SOURCE("PCIE", "pcie", "pcie"),
    SOURCE("Other", "other", "other"),
    {2, "Channel Repair Pending", "channel_repair_pending", "#v RepairStatus 1 0x0100000c No|Yes", 0, 580, 0, "?sram"},
    {2, "TPC Repair Pending", "tpc_repair_pending", "#v RepairStatus 2 0x0100000c No|Yes", 0, 580, 0, "?sram"},
    {2, "Unrepairable Memory", "unrepairable_memory", "#n UnrepairableMemoryFlag_v1 0 0 No|Yes", 0, 590, 0, "?sram"},
    {1, "Retired Pages", "retired_pages", 0, "PAGE_RETIREMENT"},
    {2, "", "multiple_single_bit_retirement"},
    {3, "Single Bit ECC", "retired_count", "retired_pages.single_bit_ecc.count"},
    {3, "", "retired_pagelist", "@retired Single"},
    {2, "", "double_bit_retirement"},
    {3, "Double Bit ECC", "retired_count", "retired_pages.double_bit.count"},
    {3, "", "retired_pagelist", "@retired Double"},
    {2, "Pending Page Blacklist", "pending_blacklist", "retired_pages.pending"},
    {2, "", "pending_retirement", "retired_pages.pending"},
    {1, "Remapped Rows", "remapped_rows", "remapped_rows.pending", "ROW_REMAPPER"},
    {2, "Correctable Error", "remapped_row_corr", "remapped_rows.correctable"},
    {2, "Inactive Correctable Error", "remapped_row_corr_inactive", "remapped_rows.correctable_inactive", 0, 595},
    {2, "Uncorrectable Error", "remapped_row_unc", "remapped_rows.uncorrectable"},
    {2, "Inactive Uncorrectable Error", "remapped_row_unc_inactive", "remapped_rows.uncorrectable_inactive", 0, 595},
    {2, "Pending", "remapped_row_pending", "remapped_rows.pending"},
    {2, "Remapping Failure Occurred", "remapped_row_failure", "remapped_rows.failure"},
    {2, "Bank Remap Availability Histogram", "row_remapper_histogram"},
    HISTOGRAM("Max", "max", 0),
    HISTOGRAM("High", "high", 1),
    HISTOGRAM("Partial", "partial", 2),
    HISTOGRAM("Low", "low", 3),
    HISTOGRAM("None", "none", 4),
    {1, "Temperature", "temperature", 0, "TEMPERATURE"},
    {2, "GPU Current Temp", "gpu_temp", "#t Temperature 0 0 - C"},
    {2, "GPU T.Limit Temp", "gpu_temp_tlimit", "#v MarginTemperature 1 0x01000008 - C", 0, 0, 610},
    {2, "GPU Current T.Limit Temp", "gpu_temp_tlimit", "#v MarginTemperature 1 0x01000008 - C", 0, 610},
    TLIMIT("GPU Shutdown", "max", 193),
    TLIMIT("GPU Slowdown", "slow", 194),
    TLIMIT("GPU Max Operating", "max_gpu", 196),
    THRESHOLD("GPU Shutdown", "max", 0),
    THRESHOLD("GPU Slowdown", "slow", 1),
    THRESHOLD("GPU Max Operating", "max_gpu", 3),
    {2, "GPU Target Temperature", "gpu_target_temperature", "#t TemperatureThreshold 5 0 - C", 0, 0, 610},
    {2, "GPU Target Temperature Specification", "gpu_target_temperature", "#t TemperatureThreshold 5 0 - C", 0, 610},
    {2, "Memory Current Temp", "memory_temp", "#f - 82 0 - C"},
    TLIMIT("Memory Max Operating", "max_mem", 195),
    THRESHOLD("Memory Max Operating", "max_mem", 2),
    {1, "Supported GPU Target Temp", "supported_gpu_target_temp", 0, "SUPPORTED_GPU_TARGET_TEMP", 0, 0, "-"},
    {2, "GPU Target Temp Min", "gpu_target_temp_min", "#t TemperatureThreshold 4 0 - C"},
    {2, "GPU Target Temp Max", "gpu_target_temp_max", "#t TemperatureThreshold 6 0 - C"},
    {1, "GPU Power Readings", "gpu_power_readings", 0, "POWER"},
    {2, "", "power_state", "power_state"},
    {2, "Power Draw", "power_draw", "power.draw", 0, 0, 570},
    {2, "Average Power Draw", "average_power_draw", "power.draw.average", 0, 570},
    {2, "Instantaneous Power Draw", "instant_power_draw", "power.draw.instant", 0, 570},
    CEILING("Current", "current", "enforced.power.limit"),
    CEILING("Requested", "requested", "power.limit"),
    CEILING("Default", "default", "power.default_limit"),
    {2, "GPU Ceiling Power Limit", 0, 0, 0, 610}, /* no XML of 610 is known: it keeps 595's elements */
    {3, "Current Power Limit", 0, "enforced.power.limit"},
    {3, "Requested Power Limit", 0, "power.limit"},
    {3, "Default Power Limit", 0, "power.default_limit"},
    {2, "GPU Base Power", 0, 0, 0, 610},
    {3, "Current Base Power", 0, "gpu.base.current"},
    {3, "Requested Base Power", 0, "gpu.base.requested"},
    {3, "Default Base Power", 0, "gpu.base.default"},
    POWER("Min", "min", "power.min_limit"),
    POWER("Max", "max", "power.max_limit"),
    {1, "Power Samples", 0, "@samples 0 W", "POWER", 0, 0, "-"},
    {1, "GPU Memory Power Readings ", "gpu_memory_power_readings", 0, "POWER", 570},
    {2, "Average Power Draw", "average_power_draw", "#f - 185 2 %.2f W"},
    {2, "Instantaneous Power Draw", "instant_power_draw", "#f - 186 2 %.2f W"},
    {1, "Module Power Readings", "module_power_readings", 0, "POWER"},
    {2, "", "power_state", "power_state"},
    {2, "Power Draw", "power_draw", "module.power.draw.average", 0, 0, 570},
    {2, "Average Power Draw", "average_power_draw", "module.power.draw.average", 0, 570},
    {2, "Instantaneous Power Draw", "instant_power_draw", "module.power.draw.instant", 0, 570},
    POWER("Current", "current", "module.enforced.power.limit"),
    POWER("Requested", "requested", "module.power.limit"),
    POWER("Default", "default", "module.power.default_limit"),
    POWER("Min", "min", "module.power.min_limit"),
    POWER("Max", "max", "module.power.max_limit"),
    {1, "Power Smoothing", "power_smoothing", "power_smoothing.enabled", "POWER_SMOOTHING", 570},
    {1, "Workload Power Profiles", "power_profiles", 0, "POWER_PROFILES", 570},
    {2, "Requested Profiles", "power_profile_requested_profiles", "=N/A"}, /* B200 too (captures) */
    {2, "Enforced Profiles", "power_profile_enforced_profiles", "=N/A"},
    {1, "EDPp Multiplier", "edpp_multiplier", "#f - 274 0 %lld.00%%", "POWER", 590},
    CLOCKS("Clocks", "clocks", "clocks.current"),
    {2, "SM", "sm_clock", "clocks.current.sm"},
    {2, "Memory", "mem_clock", "clocks.current.memory"},
    {2, "Video", "video_clock", "clocks.current.video"},
    CLOCKS("Applications Clocks", "applications_clocks", "clocks.applications"),
    {2, "Memory", "mem_clock", "clocks.applications.memory"},
    CLOCKS("Default Applications Clocks", "default_applications_clocks", "clocks.default_applications"),
    {2, "Memory", "mem_clock", "clocks.default_applications.memory"},
    {1, "Deferred Clocks", "deferred_clocks", 0, "CLOCK"},
    {2, "Memory", "mem_clock", "=N/A"}, /* locked for the next start; NVML can't be asked for it */
    CLOCKS("Max Clocks", "max_clocks", "clocks.max"),
    {2, "SM", "sm_clock", "clocks.max.sm"},
    {2, "Memory", "mem_clock", "clocks.max.memory"},
    {2, "Video", "video_clock", "#t MaxClockInfo 3 0 - MHz"},
    {1, "Max Customer Boost Clocks", "max_customer_boost_clocks", 0, "CLOCK"},
    {2, "Graphics", "graphics_clock", "#t MaxCustomerBoostClock 0 0 - MHz"},
    {1, "SM Clock Samples", 0, "@samples 5 MHz", "CLOCK", 0, 0, "-"},
    {1, "Memory Clock Samples", 0, "@samples 6 MHz", "CLOCK", 0, 0, "-"},
    {1, "Clock Policy", "clock_policy", 0, "CLOCK"},
    {2, "Auto Boost", "auto_boost", "#n AutoBoostedClocksEnabled 0 0 Off|On"},
    {2, "Auto Boost Default", "auto_boost_default", "#n AutoBoostedClocksEnabled 1 0 Off|On"},
    {1, "Voltage", "voltage", 0, "VOLTAGE", 0, 580},
    {2, "Graphics", "graphics_volt", "=N/A"}, /* not in NVML */
    {1, "Fabric", "fabric"},
    {2, "State", "state", "fabric.state"},
    {2, "Status", "status", "fabric.status"},
    {2, "CliqueId", "cliqueId", "fabric.cliqueId", 0, 550},
    {2, "ClusterUUID", "clusterUuid", "fabric.clusterUuid", 0, 550},
    {2, "Health", "health", 0, 0, 550},
    {3, "Summary", "summary", "fabric.health.summary", 0, 580},
    HEALTH("Bandwidth", "bandwidth"),
    HEALTH("Route Recovery in progress", "route_recovery_in_progress"),
    HEALTH("Route Unhealthy", "route_unhealthy"),
    HEALTH("Access Timeout Recovery", "access_timeout_recovery"),
    {3, "Incorrect Configuration", "incorrect_configuration", "fabric.health.incorrect_configuration", 0, 580},
    {3, "Partition Assigned", "partition_assigned", "fabric.health.partition_assigned", 0, 595},
    {1, "Supported Clocks", "supported_clocks", "@clocks", "SUPPORTED_CLOCKS", 0, 0, "-"},
    {1, "Processes", "processes", "@processes", "PIDS"},
    {1, "Accounted Processes", "accounted_processes", "@accounted", "ACCOUNTING", 0, 0, "-"},
    {1, "Capabilities", "capabilities", 0, 0, 570},
    {2, "EGM", "egm", "#v Capabilities 1 0x01000008 disabled|enabled"},
};

static const row of_mig[] = {
    {2, "GPU Instance ID", "gpu_instance_id", "#n GpuInstanceId"},
    {2, "Compute Instance ID", "compute_instance_id", "#n ComputeInstanceId"},
    {2, "Device Attributes", "device_attributes"},
    {3, "Shared", "shared"},
    {4, "Multiprocessor count", "multiprocessor_count", "#n Attributes_v2 0"},
    {4, "Copy Engine count", "copy_engine_count", "#n Attributes_v2 1"},
    {4, "Encoder count", "encoder_count", "#n Attributes_v2 3"},
    {4, "Decoder count", "decoder_count", "#n Attributes_v2 2"},
    {4, "OFA count", "ofa_count", "#n Attributes_v2 5"},
    {4, "JPG count", "jpg_count", "#n Attributes_v2 4"},
    {2, "ECC Errors", "ecc_error_count"},
    {3, "Volatile", "volatile_count"},
    {4, "SRAM Uncorrectable", "sram_uncorrectable", "ecc.errors.uncorrected.volatile.total"},
    {2, "FB Memory Usage|Shared FB Memory Usage", "fb_memory_usage"},
    {3, "Total", "total", "memory.total"},
    {3, "Reserved", "reserved", "memory.reserved"},
    {3, "Used", "used", "memory.used"},
    {3, "Free", "free", "memory.free"},
    {2, "BAR1 Memory Usage|Shared BAR1 Memory", "bar1_memory_usage"},
    TOTAL_USED_FREE(3, "BAR1MemoryInfo"),
};
#define COUNT(rows) (sizeof(rows) / sizeof *(rows))

static int xml, shallow; /* shallow: open rows that text doesn't show */
static int width;        /* of the labels' column */
static const char *sections;

static void print_label(int depth, const char *label, int columns) {
    const char *newer = strchr(label, '|');
    if (newer && branch() >= 580)
        label = newer + 1;
    printf("%*s%-*.*s", depth * 4, "", columns ? columns - depth * 4 : 0, (int)strcspn(label, "|"), label);
}

static void print_escaped(const char *text) {
    for (; *text; text++)
        if (strchr("<>&", *text))
            fputs(*text == '<' ? "&lt;" : *text == '>' ? "&gt;" : "&amp;", stdout);
        else
            putchar(*text);
}

static void indent(int count) { printf("%.*s", count, "\t\t\t\t\t\t\t\t"); }

static void open_row(int depth, const char *label, const char *element) {
    if (xml && element) {
        indent(depth + 1);
        printf("<%s>\n", element);
    } else if (!xml && *label) {
        print_label(depth - shallow, label, 0);
        putchar('\n');
    }
    shallow += !*label;
}

static void close_row(int depth, const char *label, const char *element) {
    if (xml && element) {
        indent(depth + 1);
        printf("</%s>\n", element);
    }
    shallow -= !*label;
}

/* Of what text has no line for. */
static void open_xml(int depth, const char *element) {
    if (xml)
        open_row(depth, "-", element);
}

static void close_xml(int depth, const char *element) {
    if (xml)
        close_row(depth, "-", element);
}

static void leaf(int depth, const char *label, const char *element, const char *text) {
    if (xml && element) {
        indent(depth + 1);
        printf("<%s>", element);
        print_escaped(!strncmp(element, "pci_", 4) && !strncmp(text, "0x", 2) ? text + 2 : text);
        printf("</%s>\n", element);
    } else if (!xml && *label) {
        print_label(depth - shallow, label, width);
        printf(": %s\n", text);
    }
}

static void number(int depth, const char *label, const char *element, const char *format, unsigned long long value) {
    char text[64];
    sprintf(text, value == ~0ULL || value == ALL ? "N/A" : format, value);
    leaf(depth, label, element, text);
}

static int has_value(const gpu *one, const char *field) {
    char text[TEXT];
    const char *unit;
    return !value_of(one, field, text, &unit);
}

static int is_shown(const gpu *one, const row *of) {
    if (branch() < of->since || (of->until && branch() >= of->until))
        return 0;
    if (of->when && strchr("?!", *of->when))
        return has_value(one, of->when + 1) == (*of->when == '?');
    return xml || !of->when || sections;
}

/* The value with its unit; nonzero where there is none. */
static int read_row(const gpu *one, const row *of, char *text) {
    const char *unit;
    if (*of->field == '=')
        return !strcpy(text, of->field + 1);
    int status = cell_of(one, of->field, text, NULL);
    if (!status && !value_of(one, of->field, text, &unit) && *unit && strcmp(text, "N/A"))
        strcat(strcat(text, " "), unit);
    return status;
}

static void write_rows(const gpu *one, const row *rows, size_t count, int depth);

static void write_migs(const gpu *one) {
    void *devices[MAX_GPUS];
    int status;
    unsigned count = mig_devices(one->handle, devices, &status), shown = 0;
    open_xml(1, "mig_devices");
    for (unsigned i = 0; i < count; i++) {
        gpu mig = {.index = one->index, .handle = devices[i]};
        if (!mig.handle)
            continue;
        shown++;
        open_row(1 + xml, "MIG Device", "mig_device");
        number(2 + xml, "Index", "index", "%llu", i);
        write_rows(&mig, of_mig, COUNT(of_mig), xml);
        close_row(1 + xml, "MIG Device", "mig_device");
    }
    if (xml && !shown)
        puts("\t\t\tNone");
    close_xml(1, "mig_devices");
}

static void write_processes(const gpu *one) {
    static process found[MAX_PROCESSES];
    unsigned count = 0;
    int status = list_processes(one->handle, found, &count, 0);
    if (status == LOST)
        worst = LOST;
    if (!count && !xml) {
        leaf(1, "Processes", NULL, !status ? "None" : unsupported(status) ? "N/A" : error_text(status));
        return;
    }
    open_row(1, "Processes", "processes");
    int before = width;
    width = 42; /* of 590 too */
    for (unsigned i = 0; i < count; i++) {
        open_xml(2, "process_info");
        number(2 + xml, "GPU instance ID", "gpu_instance_id", "%llu", found[i].info.gpu_instance);
        number(2 + xml, "Compute instance ID", "compute_instance_id", "%llu", found[i].info.compute_instance);
        number(2 + xml, "Process ID", "pid", "%llu", found[i].info.pid);
        leaf(3, "Type", "type", found[i].kind);
        leaf(3, "Name", "process_name", found[i].name);
        unsigned long long memory = found[i].info.memory;
        number(3, "Used GPU Memory", "used_memory", "%llu MiB", memory == ~0ULL ? memory : memory >> 20);
        close_xml(2, "process_info");
    }
    width = before;
    close_row(1, "Processes", "processes");
}

/* Rows of the queries for lists: how many there were; where the last one belonged. */
static unsigned emitted;
static char group[32];

static void empty(const char *label, const char *element, int status) {
    leaf(1, label, element, !status ? "None" : unsupported(status) ? "N/A" : error_text(status));
}

static void accounted(const gpu *one, const char *const *cells, int status) {
    static const char *const names[][3] = {{"GPU Utilization", "gpu_util", " %"},
                                           {"Memory Utilization", "memory_util", " %"},
                                           {"Max memory usage", "max_memory_usage", " MiB"},
                                           {"Time", "time", " ms"},
                                           {"Is Running", "is_running", ""}};
    char text[64];
    (void)one, (void)status;
    if (!emitted++ && !xml)
        open_row(1, "Accounted Processes", NULL);
    open_xml(2, "accounted_process_info");
    leaf(2 + xml, "Process ID", "pid", cells[1]);
    for (int i = 0; i < 5; i++) {
        snprintf(text, sizeof text, "%s%s", cells[i + 2] ? cells[i + 2] : "N/A", cells[i + 2] ? names[i][2] : "");
        leaf(3, names[i][0], names[i][1], text);
    }
    close_xml(2, "accounted_process_info");
}

static void supported_clock(const gpu *one, const char *const *cells, int status) {
    char text[64];
    (void)one;
    if (status || !cells[0])
        return;
    if (strcmp(group, cells[0])) {
        if (emitted && xml)
            close_row(2, "-", "supported_mem_clock");
        if (!emitted++)
            open_row(1, "Supported Clocks", "supported_clocks");
        open_xml(2, "supported_mem_clock");
        strcpy(group, cells[0]);
        sprintf(text, "%s MHz", cells[0]);
        leaf(2 + xml, "Memory", "value", text);
    }
    sprintf(text, "%s MHz", cells[1]);
    leaf(3, "Graphics", "supported_graphics_clock", text);
}

static void write_clocks(const gpu *one) {
    emitted = 0;
    *group = 0;
    int status = list_rows("--query-supported-clocks", one, supported_clock);
    if (!emitted)
        empty("Supported Clocks", "supported_clocks", status ? status : UNSUPPORTED);
    else {
        close_xml(2, "supported_mem_clock");
        close_row(1, "Supported Clocks", "supported_clocks");
    }
}

static void write_accounted(const gpu *one) {
    emitted = 0;
    open_xml(1, "accounted_processes");
    int status = list_rows("--query-accounted-apps", one, accounted);
    close_xml(1, "accounted_processes");
    if (!xml && !emitted)
        empty("Accounted Processes", NULL, status);
}

static void retired_page(const gpu *one, const char *const *cells, int status) {
    (void)one;
    if (!status && strstr(cells[2], group) && cells[0] && emitted++ < 512)
        leaf(4, "-", "retired_page_address", cells[0]);
}

/* In XML only, where the cause has a list. */
static void write_retired(const gpu *one, const char *cause) {
    char text[TEXT];
    const char *unit;
    int status = value_of(one, "retired_pages.pending", text, &unit);
    if (!xml || status) {
        leaf(3, "", "retired_pagelist", unsupported(status) ? "N/A" : error_text(status));
        return;
    }
    strcpy(group, cause);
    emitted = 0;
    open_row(3, "-", "retired_pagelist");
    list_rows("--query-retired-pages", one, retired_page);
    close_row(3, "-", "retired_pagelist");
}

/* What NVML recorded since the last time, in the unit of its values (mW for W). */
static void write_samples(const gpu *one, const char *label, const char *what) {
    static const char *const labels[] = {"Duration", "Number of Samples", "Max", "Min", "Avg"};
    static struct {
        unsigned long long time;
        union {
            double real;
            unsigned whole;
        } value;
    } of[1024];
    char unit[8] = "", text[64];
    unsigned kind = 0, type, count = 1024;
    sscanf(what, "%u %7s", &kind, unit);
    int status = nvml("nvmlDeviceGetSamples")(one->handle, kind, 0ULL, &type, &count, of);
    double scale = *unit == 'W' ? 1000 : 1, most = 0, least = 1e9, sum = 0;
    for (unsigned i = 0; !status && i < count; i++) {
        double value = of[i].value.whole / scale;
        sum += value;
        most = value > most ? value : most;
        least = value < least ? value : least;
    }
    double seconds = !status && count ? (double)(of[count - 1].time - of[0].time) / 1e6 : 0;
    const double values[] = {seconds, count, most, least, count ? sum / count : 0};
    open_row(1, label, NULL);
    for (int i = 0; i < 5; i++) {
        sprintf(text, i == 0 ? "%.2f sec" : i > 1 && *unit == 'W' ? "%.2f %s" : "%.0f", values[i], unit);
        if (i > 1 && *unit != 'W')
            strcat(strcat(text, " "), unit);
        leaf(2, labels[i], NULL, unsupported(status) ? "N/A" : status ? error_text(status) : text);
    }
    close_row(1, label, NULL);
}

static void write_special(const gpu *one, const row *of) {
    switch (of->field[1]) {
    case 'm': write_migs(one); break;
    case 'p': write_processes(one); break;
    case 'a': write_accounted(one); break;
    case 'c': write_clocks(one); break;
    case 'r': write_retired(one, of->field + 9); break;
    default:
        if (!xml)
            write_samples(one, of->label, of->field + 9);
    }
}

static void write_rows(const gpu *one, const row *rows, size_t count, int more) {
    const row *opened[8];
    int open = 0, section = 1;
    for (size_t i = 0; i <= count; i++) {
        while (open && (i == count || rows[i].depth <= opened[open - 1]->depth)) {
            open--;
            close_row(opened[open]->depth + more, opened[open]->label, opened[open]->element);
        }
        if (i == count)
            break;
        const row *of = &rows[i];
        char text[TEXT];
        int heading = i + 1 < count && rows[i + 1].depth > of->depth, status = OK;
        if (of->depth == 1)
            section = !sections || (of->section && in_list(sections, of->section));
        int shown = section && is_shown(one, of);
        if (shown && of->field && *of->field == '@')
            write_special(one, of);
        else if (shown && heading && (!of->field || !(status = read_row(one, of, text)))) {
            open_row(of->depth + more, of->label, of->element);
            opened[open++] = of;
        } else if (shown) {
            if (!heading)
                read_row(one, of, text);
            leaf(of->depth + more, of->label, of->element, text);
        }
        if (heading && (!shown || status))
            while (i + 1 < count && rows[i + 1].depth > of->depth)
                i++;
    }
}

static int known_sections(const char *list) {
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        char word[64];
        size_t i = 0;
        snprintf(word, sizeof word, "%.*s", (int)strcspn(at, ","), at);
        while (i < COUNT(layout) && !(layout[i].section && !strcasecmp(layout[i].section, word)))
            i++;
        if (i == COUNT(layout))
            return 0;
    }
    return 1;
}

int show_report(const char *asked, int as_xml) {
    char text[TEXT];
    int status;
    if (asked && !known_sections(asked)) {
        puts("Failed to parse --display/-d flags");
        return INVALID;
    }
    if ((status = choose_gpus()))
        return status;
    xml = as_xml;
    sections = asked;
    width = branch() < 580 ? 42 : 55; /* 570.148 and 580.159 in public logs */
    time_t now = time(NULL);
    unsigned total = 0;
    nvml("nvmlDeviceGetCount_v2")(&total);
    if (xml)
        printf("<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v%d.dtd\">\n"
               "<nvidia_smi_log>\n",
               branch() < 580 ? 12 : 13);
    else
        puts("\n==============NVSMI LOG==============\n");
    strftime(text, sizeof text, "%a %b %e %H:%M:%S %Y", localtime(&now));
    leaf(0, "Timestamp", "timestamp", text);
    leaf(0, "Driver Version", "driver_version", driver_version(text) ? "N/A" : text);
    leaf(0, "CUDA Version", "cuda_version", cuda_version(text) ? "Not Found" : text);
    if (branch() >= 610) {
        leaf(0, "KMD Version", "kmd_version", driver_version(text) ? "N/A" : text);
        leaf(0, "CUDA UMD Version", "cuda_umd_version", cuda_version(text) ? "Not Found" : text);
    }
    if (!xml)
        putchar('\n');
    number(0, "Attached GPUs", "attached_gpus", "%llu", total);
    for (unsigned at = 0; at < gpu_count; at++) {
        printf(xml ? "\t<gpu id=\"%s\">\n" : "GPU %s\n", gpus[at].bus_id);
        write_rows(&gpus[at], layout, COUNT(layout), 0);
        puts(xml ? "\t</gpu>\n" : "");
    }
    if (xml)
        puts("</nvidia_smi_log>");
    return worst;
}
