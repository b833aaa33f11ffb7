"""Downloads files, each complete and verified or absent: by http(s), s3, gs, hdfs, or from a path."""

from echelon.data.download.downloader import Downloader, local

__all__ = ["Downloader", "local"]
