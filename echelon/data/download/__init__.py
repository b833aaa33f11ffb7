"""Downloads files, each complete and verified or absent: by http(s), s3, gs, hdfs, or from a path."""

from echelon.data.download.dataset_cache import local
from echelon.data.download.downloader import Downloader

__all__ = ["Downloader", "local"]
