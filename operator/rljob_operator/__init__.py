"""The RLJob operator and the `rljob` command line."""
