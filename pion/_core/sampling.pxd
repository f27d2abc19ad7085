# The C interface may change in a minor release.
# This module has none: it works on Python objects.
