//! What DSec has compiled: digests and gzip for the converter. No crates, nothing newer than Rust 1.63. States are memory of the
//! caller's: nothing is allocated, nothing has to be freed, and a caller that goes away leaves nothing behind.
mod crc32;
mod deflate;
mod gzip;
mod hot_loop;
mod huffman;
mod sha256;
