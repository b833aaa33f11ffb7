"""The models of the zoo, one file per family; importing a file registers its models."""
