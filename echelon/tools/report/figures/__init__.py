"""Pictures as geometry, from data alone: the page only writes down where things are."""
