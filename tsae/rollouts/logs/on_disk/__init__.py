"""The files of a log: found, read row by row, divided into parts."""
