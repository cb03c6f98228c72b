/* The double of NVML: functions that exist, and whose subject no machine of the double has.
 *
 * A program in Go or C that links against NVML does not start when one symbol is missing, so all are here. They
 * check what the real library checks first, and answer what it answers where the feature is not there. From which
 * branch on a function exists: the nvml.h of each CUDA release, as the tags of NVIDIA/go-nvml have it (11.4 is
 * branch 470, 13.3 is 610); those of 615 are only in nvidia-ml-py 13.615.
 *
 * Each takes only its first argument. A caller passes the others in registers, or on a stack that it clears itself
 * (System V AMD64 ABI 3.2.3, AAPCS64 6.4): a function that does not read them does not disturb it.
 */
#include <unistd.h>

#include "double.h"

static int of_device(const char *function, const void *device) {
    target asked;
    int status = device_gate(function, device, device, &asked);
    return status ? status : UNSUPPORTED;
}

static int for_root(const char *function, const void *device) {
    int status = of_device(function, device);
    return status == UNSUPPORTED && geteuid() ? NO_PERMISSION : status;
}

static int of_system(const char *function, int answer) {
    int status = system_gate(function);
    return status ? status : answer;
}

#define DEVICE(name) \
    API int name(const void *device) { return of_device(#name, device); }
#define ROOT_DEVICE(name) \
    API int name(const void *device) { return for_root(#name, device); }
#define INSTANCE(name) \
    API int name(const void *instance) { return of_system(#name, instance ? UNSUPPORTED : INVALID); }
#define SYSTEM(name) \
    API int name(void) { return of_system(#name, UNSUPPORTED); }
#define ROOT_SYSTEM(name) \
    API int name(void) { return of_system(#name, geteuid() ? NO_PERMISSION : UNSUPPORTED); }
/* Nobody excludes a GPU, so no index of one is valid. */
#define EXCLUDED(name) \
    API int name(void) { return of_system(#name, INVALID); }
/* No S-class unit is there, so neither an index nor a handle of one is valid; nor is a number of a vGPU type. */
#define UNIT(name) \
    API int name(void) { return of_system(#name, INVALID); }
#define VGPU_TYPE(name) \
    API int name(void) { return of_system(#name, INVALID); }
#define VGPU_INSTANCE(name) \
    API int name(unsigned instance) { return of_system(#name, instance ? NOT_FOUND : INVALID); }

/* ---- in every branch that the double stands for */

DEVICE(nvmlDeviceGetAPIRestriction)
DEVICE(nvmlDeviceGetActiveVgpus)
DEVICE(nvmlDeviceGetAutoBoostedClocksEnabled)
DEVICE(nvmlDeviceGetBridgeChipInfo)
DEVICE(nvmlDeviceGetClkMonStatus)
DEVICE(nvmlDeviceGetCreatableVgpus)
DEVICE(nvmlDeviceGetEncoderCapacity)
DEVICE(nvmlDeviceGetGpuOperationMode)
DEVICE(nvmlDeviceGetGridLicensableFeatures)
DEVICE(nvmlDeviceGetGridLicensableFeatures_v2)
DEVICE(nvmlDeviceGetGridLicensableFeatures_v3)
DEVICE(nvmlDeviceGetGridLicensableFeatures_v4)
DEVICE(nvmlDeviceGetHostVgpuMode)
DEVICE(nvmlDeviceGetNvLinkUtilizationControl)
DEVICE(nvmlDeviceGetNvLinkUtilizationCounter)
DEVICE(nvmlDeviceGetPgpuMetadataString)
DEVICE(nvmlDeviceGetSupportedVgpus)
DEVICE(nvmlDeviceGetVgpuMetadata)
DEVICE(nvmlDeviceGetVgpuProcessUtilization)
DEVICE(nvmlDeviceGetVgpuUtilization)
ROOT_DEVICE(nvmlDeviceFreezeNvLinkUtilizationCounter)
ROOT_DEVICE(nvmlDeviceResetNvLinkUtilizationCounter)
ROOT_DEVICE(nvmlDeviceSetAPIRestriction)
ROOT_DEVICE(nvmlDeviceSetAutoBoostedClocksEnabled)
ROOT_DEVICE(nvmlDeviceSetDefaultAutoBoostedClocksEnabled)
ROOT_DEVICE(nvmlDeviceSetDriverModel)
ROOT_DEVICE(nvmlDeviceSetGpuOperationMode)
ROOT_DEVICE(nvmlDeviceSetNvLinkUtilizationControl)
ROOT_DEVICE(nvmlDeviceSetTemperatureThreshold)
ROOT_DEVICE(nvmlDeviceSetVirtualizationMode)
SYSTEM(nvmlDeviceQueryDrainState)
SYSTEM(nvmlGetVgpuCompatibility)
SYSTEM(nvmlGetVgpuVersion)
SYSTEM(nvmlInternalGetExportTable)
ROOT_SYSTEM(nvmlDeviceDiscoverGpus)
ROOT_SYSTEM(nvmlDeviceModifyDrainState)
ROOT_SYSTEM(nvmlDeviceRemoveGpu)
ROOT_SYSTEM(nvmlDeviceRemoveGpu_v2)
ROOT_SYSTEM(nvmlSetVgpuVersion)
UNIT(nvmlUnitGetDevices)
UNIT(nvmlUnitGetFanSpeedInfo)
UNIT(nvmlUnitGetHandleByIndex)
UNIT(nvmlUnitGetLedState)
UNIT(nvmlUnitGetPsuInfo)
UNIT(nvmlUnitGetTemperature)
UNIT(nvmlUnitGetUnitInfo)
UNIT(nvmlUnitSetLedState)
VGPU_TYPE(nvmlVgpuTypeGetClass)
VGPU_TYPE(nvmlVgpuTypeGetDeviceID)
VGPU_TYPE(nvmlVgpuTypeGetFrameRateLimit)
VGPU_TYPE(nvmlVgpuTypeGetFramebufferSize)
VGPU_TYPE(nvmlVgpuTypeGetGpuInstanceProfileId)
VGPU_TYPE(nvmlVgpuTypeGetLicense)
VGPU_TYPE(nvmlVgpuTypeGetMaxInstances)
VGPU_TYPE(nvmlVgpuTypeGetMaxInstancesPerVm)
VGPU_TYPE(nvmlVgpuTypeGetName)
VGPU_TYPE(nvmlVgpuTypeGetNumDisplayHeads)
VGPU_TYPE(nvmlVgpuTypeGetResolution)
VGPU_INSTANCE(nvmlVgpuInstanceClearAccountingPids)
VGPU_INSTANCE(nvmlVgpuInstanceGetAccountingMode)
VGPU_INSTANCE(nvmlVgpuInstanceGetAccountingPids)
VGPU_INSTANCE(nvmlVgpuInstanceGetAccountingStats)
VGPU_INSTANCE(nvmlVgpuInstanceGetEccMode)
VGPU_INSTANCE(nvmlVgpuInstanceGetEncoderCapacity)
VGPU_INSTANCE(nvmlVgpuInstanceGetEncoderSessions)
VGPU_INSTANCE(nvmlVgpuInstanceGetEncoderStats)
VGPU_INSTANCE(nvmlVgpuInstanceGetFBCSessions)
VGPU_INSTANCE(nvmlVgpuInstanceGetFBCStats)
VGPU_INSTANCE(nvmlVgpuInstanceGetFbUsage)
VGPU_INSTANCE(nvmlVgpuInstanceGetFrameRateLimit)
VGPU_INSTANCE(nvmlVgpuInstanceGetGpuInstanceId)
VGPU_INSTANCE(nvmlVgpuInstanceGetLicenseStatus)
VGPU_INSTANCE(nvmlVgpuInstanceGetMdevUUID)
VGPU_INSTANCE(nvmlVgpuInstanceGetMetadata)
VGPU_INSTANCE(nvmlVgpuInstanceGetType)
VGPU_INSTANCE(nvmlVgpuInstanceGetUUID)
VGPU_INSTANCE(nvmlVgpuInstanceGetVmDriverVersion)
VGPU_INSTANCE(nvmlVgpuInstanceGetVmID)
VGPU_INSTANCE(nvmlVgpuInstanceSetEncoderCapacity)
EXCLUDED(nvmlGetBlacklistDeviceInfoByIndex)
EXCLUDED(nvmlGetExcludedDeviceInfoByIndex)

#if DRIVER >= 495

DEVICE(nvmlDeviceGetIrqNum)
VGPU_INSTANCE(nvmlVgpuInstanceGetLicenseInfo)

#endif
#if DRIVER >= 510

DEVICE(nvmlDeviceGetAdaptiveClockInfoStatus)
VGPU_INSTANCE(nvmlVgpuInstanceGetGpuPciId)
VGPU_INSTANCE(nvmlVgpuInstanceGetLicenseInfo_v2)

#endif
#if DRIVER >= 515

DEVICE(nvmlDeviceGetGpcClkVfOffset)
DEVICE(nvmlDeviceGetMinMaxClockOfPState)
DEVICE(nvmlDeviceGetMinMaxFanSpeed)
DEVICE(nvmlDeviceGetSupportedPerformanceStates)
DEVICE(nvmlDeviceGetThermalSettings)
ROOT_DEVICE(nvmlDeviceSetDefaultFanSpeed_v2)
ROOT_DEVICE(nvmlDeviceSetFanSpeed_v2)
ROOT_DEVICE(nvmlDeviceSetGpcClkVfOffset)
VGPU_TYPE(nvmlVgpuTypeGetCapabilities)

#endif
#if DRIVER >= 520

/* nvmlGpmSupport_t: its version, which is 1, and whether it is supported. */
API int nvmlGpmQueryDeviceSupport(const void *device, unsigned *version_and_support) {
    target asked;
    int status = device_gate(__func__, device, version_and_support, &asked);
    if (!status && version_and_support[0] != 1)
        return VERSION_MISMATCH;
    if (!status)
        version_and_support[1] = 0;
    return status;
}

DEVICE(nvmlDeviceGetGpcClkMinMaxVfOffset)
DEVICE(nvmlDeviceGetMemClkMinMaxVfOffset)
DEVICE(nvmlDeviceGetMemClkVfOffset)
ROOT_DEVICE(nvmlDeviceSetMemClkVfOffset)
SYSTEM(nvmlGpmMetricsGet)
SYSTEM(nvmlGpmSampleAlloc)
SYSTEM(nvmlGpmSampleFree)
SYSTEM(nvmlGpmSampleGet)

#endif
#if DRIVER >= 525

DEVICE(nvmlDeviceGetVgpuCapabilities)
DEVICE(nvmlDeviceGetVgpuSchedulerCapabilities)
DEVICE(nvmlDeviceGetVgpuSchedulerLog)
DEVICE(nvmlDeviceGetVgpuSchedulerState)
ROOT_DEVICE(nvmlDeviceClearFieldValues)
ROOT_DEVICE(nvmlDeviceSetFanControlPolicy)
ROOT_DEVICE(nvmlDeviceSetNvLinkDeviceLowPowerThreshold)
ROOT_DEVICE(nvmlDeviceSetVgpuSchedulerState)
SYSTEM(nvmlGetVgpuDriverCapabilities)
SYSTEM(nvmlGpmMigSampleGet)

#endif
#if DRIVER >= 535

DEVICE(nvmlDeviceGetConfComputeGpuAttestationReport)
DEVICE(nvmlDeviceGetConfComputeGpuCertificate)
DEVICE(nvmlDeviceGetConfComputeMemSizeInfo)
DEVICE(nvmlGpmQueryIfStreamingEnabled)
ROOT_DEVICE(nvmlDeviceSetConfComputeUnprotectedMemSize)
ROOT_DEVICE(nvmlGpmSetStreamingEnabled)
SYSTEM(nvmlSystemGetNvlinkBwMode)
ROOT_SYSTEM(nvmlSystemSetConfComputeGpusReadyState)
ROOT_SYSTEM(nvmlSystemSetNvlinkBwMode)

#endif
#if DRIVER >= 545

DEVICE(nvmlDeviceGetLastBBXFlushTime)

#endif
#if DRIVER >= 550

DEVICE(nvmlDeviceGetVgpuHeterogeneousMode)
DEVICE(nvmlDeviceGetVgpuInstancesUtilizationInfo)
DEVICE(nvmlDeviceGetVgpuProcessesUtilizationInfo)
DEVICE(nvmlDeviceGetVgpuTypeCreatablePlacements)
DEVICE(nvmlDeviceGetVgpuTypeSupportedPlacements)
ROOT_DEVICE(nvmlDeviceSetVgpuCapabilities)
ROOT_DEVICE(nvmlDeviceSetVgpuHeterogeneousMode)
SYSTEM(nvmlSystemGetConfComputeKeyRotationThresholdInfo)
ROOT_SYSTEM(nvmlSystemSetConfComputeKeyRotationThresholdInfo)
VGPU_TYPE(nvmlVgpuTypeGetFbReservation)
VGPU_TYPE(nvmlVgpuTypeGetGspHeapSize)
VGPU_INSTANCE(nvmlVgpuInstanceGetPlacementId)

#endif
#if DRIVER >= 555

DEVICE(nvmlDeviceGetClockOffsets)
ROOT_DEVICE(nvmlDeviceSetClockOffsets)

#endif
#if DRIVER >= 560

VGPU_TYPE(nvmlVgpuTypeGetBAR1Info)

#endif
#if DRIVER >= 570

DEVICE(nvmlDeviceGetCoolerInfo)
DEVICE(nvmlDeviceGetCurrentClockFreqs)
DEVICE(nvmlDeviceGetDramEncryptionMode)
DEVICE(nvmlDeviceGetFanSpeedRPM)
DEVICE(nvmlDeviceGetNvlinkBwMode)
DEVICE(nvmlDeviceGetNvlinkSupportedBwModes)
DEVICE(nvmlDeviceGetPerformanceModes)
DEVICE(nvmlDeviceWorkloadPowerProfileGetCurrentProfiles)
DEVICE(nvmlDeviceWorkloadPowerProfileGetProfilesInfo)
ROOT_DEVICE(nvmlDevicePowerSmoothingActivatePresetProfile)
ROOT_DEVICE(nvmlDevicePowerSmoothingSetState)
ROOT_DEVICE(nvmlDevicePowerSmoothingUpdatePresetProfileParam)
ROOT_DEVICE(nvmlDeviceSetDramEncryptionMode)
ROOT_DEVICE(nvmlDeviceSetNvlinkBwMode)
ROOT_DEVICE(nvmlDeviceWorkloadPowerProfileClearRequestedProfiles)
ROOT_DEVICE(nvmlDeviceWorkloadPowerProfileSetRequestedProfiles)
VGPU_INSTANCE(nvmlVgpuInstanceGetRuntimeStateSize)

#endif
#if DRIVER >= 575

INSTANCE(nvmlGpuInstanceGetActiveVgpus)
INSTANCE(nvmlGpuInstanceGetCreatableVgpus)
INSTANCE(nvmlGpuInstanceGetVgpuHeterogeneousMode)
INSTANCE(nvmlGpuInstanceGetVgpuSchedulerLog)
INSTANCE(nvmlGpuInstanceGetVgpuSchedulerState)
INSTANCE(nvmlGpuInstanceGetVgpuTypeCreatablePlacements)
INSTANCE(nvmlGpuInstanceSetVgpuHeterogeneousMode)
INSTANCE(nvmlGpuInstanceSetVgpuSchedulerState)
SYSTEM(nvmlSystemEventSetCreate)
SYSTEM(nvmlSystemEventSetFree)
SYSTEM(nvmlSystemEventSetWait)
SYSTEM(nvmlSystemRegisterEvents)
VGPU_TYPE(nvmlVgpuTypeGetMaxInstancesPerGpuInstance)

#endif
#if DRIVER >= 580

DEVICE(nvmlDeviceGetNvLinkInfo)
DEVICE(nvmlDeviceGetPowerMizerMode_v1)
DEVICE(nvmlDeviceGetSramUniqueUncorrectedEccErrorCounts)
DEVICE(nvmlDeviceReadWritePRM_v1)
ROOT_DEVICE(nvmlDeviceSetPowerMizerMode_v1)

#endif
#if DRIVER >= 590

DEVICE(nvmlDeviceGetHostname_v1)
DEVICE(nvmlDeviceReadPRMCounters_v1)
ROOT_DEVICE(nvmlDeviceSetHostname_v1)
ROOT_DEVICE(nvmlDeviceSetRusdSettings_v1)
ROOT_DEVICE(nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1)

#endif
#if DRIVER >= 595

DEVICE(nvmlDeviceGetVgpuSchedulerLog_v2)
DEVICE(nvmlDeviceGetVgpuSchedulerState_v2)
ROOT_DEVICE(nvmlDeviceSetVgpuSchedulerState_v2)
ROOT_DEVICE(nvmlDeviceVgpuForceGspUnload)
INSTANCE(nvmlGpuInstanceGetVgpuSchedulerLog_v2)
INSTANCE(nvmlGpuInstanceGetVgpuSchedulerState_v2)
INSTANCE(nvmlGpuInstanceSetVgpuSchedulerState_v2)

#endif
#if DRIVER >= 610

DEVICE(nvmlDeviceGetAccountingStats_v2)
DEVICE(nvmlDeviceGetBBXTimeData_v1)
SYSTEM(nvmlDeviceGetHandles)
SYSTEM(nvmlSystemGetCPER_v1)

#endif
#if DRIVER >= 615

DEVICE(nvmlDeviceGetAdaptiveTgpModeInfo_v1)
DEVICE(nvmlDeviceGetBankRemapperStatus_v1)
DEVICE(nvmlDeviceGetGpuFabricInfo_v4)
DEVICE(nvmlDeviceGetMemoryLimits_v1)
DEVICE(nvmlDeviceGetNvLinkTelemetrySamples_v1)
DEVICE(nvmlDevicePerfMetricsGetSamples_v1)
ROOT_DEVICE(nvmlDeviceSetAdaptiveTgpMode_v1)
ROOT_DEVICE(nvmlDeviceSetMemoryLimits_v1)
ROOT_DEVICE(nvmlDeviceSetNvlinkBwModeAsync_v1)
SYSTEM(nvmlEventSetGetContextCount_v1)
SYSTEM(nvmlEventSetGetContextData_v1)
SYSTEM(nvmlEventSetGetContextInfo_v1)
SYSTEM(nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1)
SYSTEM(nvmlEventSetRegisterGpuOperationalEvents_v1)
SYSTEM(nvmlEventSetWait_v3)

#endif
