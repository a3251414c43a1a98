//! Integration tests through the public API.
