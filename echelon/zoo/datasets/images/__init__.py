"""What the image data sets share: pictures in memory, pictures in files, and files kept in memory."""
