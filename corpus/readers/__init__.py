"""Records of files and objects of every format, as a stream in bounded memory."""
