"""From a request for GPUs to every machine that satisfies all of it: where, for how much, and what runs.

Values: `Request`, what a machine must have; `Offer`, a machine that satisfies it, with its prices;
`NearMiss`, a machine that nearly does, with its mismatches; `Figure`, a number of money with its source and
its day.

    request       reads `A10G,L4:1..4` and the other options into a `Request`
    select        compares each type of the catalogue with it; orders offers by price
    estimate      a price where none is known, for the order only
    fit           whether image and workload fit a machine, by the catalogue's rules
    image         the image that a machine would be started from
    prices, cost  prices by day and source; the cost of a month
    availability  zones, quota, likelihood and reservations, asked of the cloud
    size          GPU memory of a transformer model, term by term
    listing, view the answers of the commands, as documents and for people
    refresh       queries a region and caches the answers, with price_files.py for AWS's public price list
    cache         the cached answers, a file for each cloud and region
    difference    what EC2 has and the shipped catalogue lacks, as a patch

Only availability.py, image.py and refresh.py talk to a cloud, and only refresh.py writes the cache. A new
option of a request is a field of `Request`, a word of `parse_request` and a line of `select._mismatches`.
"""
