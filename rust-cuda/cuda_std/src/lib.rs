//! Subset of Rust-CUDA's cuda_std over rustc's own NVPTX back end.
