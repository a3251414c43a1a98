//! Expansion of `#[kernel]`.

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::{Attribute, Error, FnArg, Ident, ItemFn, LitInt, Pat, Result, ReturnType, Token, Type};

/// `threads`, `min_blocks` and `cluster` of `#[kernel(...)]`.
#[derive(Default)]
pub(crate) struct LaunchBounds {
    threads: Option<u32>,
    min_blocks: Option<u32>,
    cluster: Option<u32>,
}

impl Parse for LaunchBounds {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut bounds = Self::default();
        while !input.is_empty() {
            let key: Ident = input.parse()?;
            input.parse::<Token![=]>()?;
            let literal: LitInt = input.parse()?;
            let value: u32 = literal.base10_parse()?;
            let (field, max) = match key.to_string().as_str() {
                "threads" => (&mut bounds.threads, 1024),
                "min_blocks" => (&mut bounds.min_blocks, 32),
                "cluster" => (&mut bounds.cluster, 16),
                _ => {
                    return Err(Error::new(
                        key.span(),
                        "expected threads, min_blocks or cluster",
                    ));
                }
            };
            if value == 0 || value > max {
                return Err(Error::new(
                    literal.span(),
                    format!("{key} must be in 1..={max}"),
                ));
            }
            if field.replace(value).is_some() {
                return Err(Error::new(key.span(), format!("{key} is given twice")));
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        if bounds.min_blocks.is_some() && bounds.threads.is_none() {
            // ptxas ignores .minnctapersm without a bound on the threads.
            return Err(input.error("min_blocks needs threads"));
        }
        Ok(bounds)
    }
}

impl LaunchBounds {
    /// The comment that `cuda_builder` turns into directives, or `None` without bounds.
    fn comment(&self, kernel: &Ident) -> Option<String> {
        let fields = [
            ("maxntid", self.threads),
            ("minnctapersm", self.min_blocks),
            ("reqnctapercluster", self.cluster),
        ];
        let list: Vec<String> = fields
            .iter()
            .filter_map(|(name, value)| value.map(|v| format!("{name}={v}")))
            .collect();
        (!list.is_empty()).then(|| format!("// cuda_std launch_bounds {kernel} {}", list.join(" ")))
    }
}

pub(crate) fn expand(bounds: &LaunchBounds, host: ItemFn) -> Result<TokenStream> {
    check_signature(&host)?;

    let mut device = host.clone();
    let mut host = host;
    let name = device.sig.ident.clone();
    let mut prologue = Vec::new();
    for (index, (on_device, on_host)) in device
        .sig
        .inputs
        .iter_mut()
        .zip(&mut host.sig.inputs)
        .enumerate()
    {
        let (FnArg::Typed(on_device), FnArg::Typed(on_host)) = (on_device, on_host) else {
            unreachable!("check_signature rejects self");
        };
        if !take_grid_constant(&mut on_device.attrs) {
            continue;
        }
        take_grid_constant(&mut on_host.attrs);
        let (Pat::Ident(pat), Type::Reference(reference)) = (&*on_device.pat, &*on_device.ty)
        else {
            return Err(Error::new_spanned(
                &*on_host,
                "#[grid_constant] needs `name: &Type`",
            ));
        };
        let (ident, ty) = (pat.ident.clone(), reference.elem.clone());
        let address = format!("mov.b64 {{0}}, {name}_param_{index};");
        prologue.push(quote! {
            let #ident: &#ty = {
                let address: u64;
                // SAFETY: names this kernel's own parameter, which lives and stays
                // unchanged as long as the grid runs, and converts its address to a
                // generic one.
                unsafe {
                    ::core::arch::asm!(
                        #address,
                        "cvta.param.u64 {0}, {0};",
                        out(reg64) address,
                        options(pure, nomem, nostack, preserves_flags),
                    );
                    &*(address as *const #ty)
                }
            };
        });
        *on_device.pat = syn::parse_quote!(_);
        *on_device.ty = *ty;
    }

    let ItemFn {
        attrs,
        vis,
        mut sig,
        block,
    } = device;
    sig.abi = Some(syn::parse_quote!(extern "ptx-kernel"));
    let statements = &block.stmts;
    let cfgs: Vec<&Attribute> = attrs.iter().filter(|a| a.path().is_ident("cfg")).collect();
    let comment = bounds.comment(&name).map(|text| {
        quote! {
            #(#cfgs)*
            #[cfg(target_arch = "nvptx64")]
            ::core::arch::global_asm!(#text);
        }
    });
    Ok(quote! {
        #comment

        #[cfg(target_arch = "nvptx64")]
        #[unsafe(no_mangle)]
        #(#attrs)*
        #vis #sig {
            #(#prologue)*
            #(#statements)*
        }

        #[cfg(not(target_arch = "nvptx64"))]
        #host
    })
}

fn check_signature(function: &ItemFn) -> Result<()> {
    let sig = &function.sig;
    let refuse = |tokens: &dyn quote::ToTokens, message| Err(Error::new_spanned(tokens, message));
    if sig.unsafety.is_none() {
        return refuse(
            &sig.fn_token,
            "a kernel must be an `unsafe fn`: its launch is unchecked",
        );
    }
    if sig.abi.is_some() || sig.asyncness.is_some() || sig.constness.is_some() {
        return refuse(&sig.ident, "a kernel is a plain `unsafe fn`");
    }
    if !sig.generics.params.is_empty() {
        return refuse(
            &sig.generics,
            "a kernel cannot be generic: its symbol has one name",
        );
    }
    if !matches!(sig.output, ReturnType::Default) {
        return refuse(&sig.output, "a kernel returns nothing");
    }
    if let Some(receiver) = sig.receiver() {
        return refuse(receiver, "a kernel is a free function");
    }
    Ok(())
}

/// Removes `#[grid_constant]`, and says whether it was there.
fn take_grid_constant(attrs: &mut Vec<Attribute>) -> bool {
    let before = attrs.len();
    attrs.retain(|a| !a.path().is_ident("grid_constant"));
    attrs.len() != before
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expand_text(args: &str, item: &str) -> std::result::Result<String, String> {
        let bounds: LaunchBounds = syn::parse_str(args).map_err(|e| e.to_string())?;
        let item: ItemFn = syn::parse_str(item).map_err(|e| e.to_string())?;
        expand(&bounds, item)
            .map(|t| t.to_string())
            .map_err(|e| e.to_string())
    }

    #[test]
    fn bounds_become_one_comment() {
        let text = expand_text(
            "threads = 384, min_blocks = 1, cluster = 2",
            "pub unsafe fn gemm(n: u32) {}",
        )
        .unwrap();
        assert!(text.contains(
            "// cuda_std launch_bounds gemm maxntid=384 minnctapersm=1 reqnctapercluster=2"
        ));
        assert!(text.contains("extern \"ptx-kernel\" fn gemm"));
        let plain = expand_text("", "pub unsafe fn gemm(n: u32) {}").unwrap();
        assert!(!plain.contains("launch_bounds"));
    }

    #[test]
    fn the_comment_follows_the_kernels_cfg() {
        let text = expand_text(
            "threads = 32",
            "#[cfg(feature = \"gemm\")] pub unsafe fn f(n: u32) {}",
        )
        .unwrap();
        assert_eq!(text.matches("feature = \"gemm\"").count(), 3);
    }

    #[test]
    fn grid_constant_is_by_value_on_the_device() {
        let text = expand_text(
            "",
            "pub unsafe fn f(n: u32, #[grid_constant] map: &TensorMap) { use_it(map) }",
        )
        .unwrap();
        assert!(text.contains("_ : TensorMap"));
        assert!(text.contains("f_param_1"));
        assert!(text.contains("map : & TensorMap) {"), "{text}");
        assert!(!text.contains("grid_constant"));
    }

    #[test]
    fn wrong_uses_are_refused() {
        for (args, item, message) in [
            ("", "pub fn f() {}", "unsafe fn"),
            ("", "pub unsafe fn f<T>() {}", "generic"),
            ("", "pub unsafe fn f() -> u32 { 0 }", "returns nothing"),
            (
                "",
                "pub unsafe fn f(#[grid_constant] m: Map) {}",
                "name: &Type",
            ),
            ("threads = 2048", "pub unsafe fn f() {}", "1..=1024"),
            ("threads = 0", "pub unsafe fn f() {}", "1..=1024"),
            ("threads = 1, threads = 2", "pub unsafe fn f() {}", "twice"),
            ("min_blocks = 1", "pub unsafe fn f() {}", "needs threads"),
            ("warps = 1", "pub unsafe fn f() {}", "expected threads"),
        ] {
            let error = expand_text(args, item).unwrap_err();
            assert!(error.contains(message), "{args} {item}: {error}");
        }
    }
}
