"""Generate the CRD and the reference pages from the types: `python -m rljob_api.crdgen [--check]`."""
