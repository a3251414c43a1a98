//! The `#[kernel]` attribute of `cuda_std`.

mod kernel;

use proc_macro::TokenStream;
use syn::parse_macro_input;

/// Makes an `unsafe fn` a kernel: a `.visible .entry` of the same name in the PTX.
///
/// On `nvptx64` the function becomes `#[unsafe(no_mangle)] extern "ptx-kernel"`;
/// on other targets it stays an ordinary function, so that it is type-checked
/// and linted with the rest.
///
/// ```ignore
/// #[kernel]
/// pub unsafe fn scale(n: u32, a: f32, x: *mut f32) { /* ... */ }
///
/// #[kernel(threads = 384, min_blocks = 1, cluster = 2)]
/// pub unsafe fn gemm(n: u32, #[grid_constant] b_map: &TensorMap) { /* ... */ }
/// ```
///
/// # Arguments
///
/// - `threads = N`: the launch uses at most N threads a block (`.maxntid N, 1, 1`).
///   ptxas needs it to honour `setmaxnreg`.
/// - `min_blocks = N`: blocks that must fit on one SM (`.minnctapersm N`), a bound on registers.
/// - `cluster = N`: blocks of a cluster (`.reqnctapercluster N, 1, 1`).
///
/// rustc has no way to say these three, so they travel as comments in the
/// module's assembly and `cuda_builder` puts them where they belong.
///
/// # Parameters
///
/// A parameter marked `#[grid_constant]` has type `&T`. The launch passes the T
/// by value, and the body gets a reference to the parameter itself, without the
/// copy to local memory that taking a reference to a by-value parameter means.
/// `&TensorMap` is what it exists for.
#[proc_macro_attribute]
pub fn kernel(args: TokenStream, item: TokenStream) -> TokenStream {
    let args = parse_macro_input!(args as kernel::LaunchBounds);
    let item = parse_macro_input!(item as syn::ItemFn);
    kernel::expand(&args, item)
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}
