"""Files from somewhere else, whole and verified or not there at all: by http(s), s3, gs, hdfs, or from a path."""

from echelon.data.download.dataset_cache import local
from echelon.data.download.downloader import Downloader

__all__ = ["Downloader", "local"]
