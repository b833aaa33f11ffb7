"""The data sets of the zoo, one file per kind; importing a file registers its data sets."""
