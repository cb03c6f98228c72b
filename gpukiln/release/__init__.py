"""Release: copy a verified image, share it, point a channel at it, roll back, and prune old images.

`verification.ImageVerification` is what is known of how an image was verified, `publish.ReleaseSpec` what is
released where, `log.Release` what was done in each region. `find.py` finds an image by its record or its
tags, `needs.py` compares it with what a channel requires, `publish.py` and `rollback.py` move channels by the
steps of `run.py` in the regions of `regions.py`, with the calls of `images.py` and the statements of
`signing.py`. `overview.py` reads every channel, `prune.py` removes images that `in_use.py` does not list.
`diff.py` compares two images (`compared_image.py`, `versions.py`, `vulnerabilities.py` with `osv.py`),
`diff_view.py` and `notes.py` show the result; `options.py` reads what was typed, `view.py` prints tables.
"""
