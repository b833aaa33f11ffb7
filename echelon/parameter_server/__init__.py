"""The parameter server: sparse tables for any int64 id, dense blocks, and the modes that apply updates."""
