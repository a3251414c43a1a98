//! What is run, as data.

use std::fmt;

use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::bank::{BankGeometry, PANEL_ROWS, UNIT_ROW_BYTES};

/// Grouped GEMM: for each of `experts`, some rows of A times its B [N, K].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmShape {
    /// Weight matrices in a call.
    pub experts: usize,
    /// Rows of B: columns of D.
    pub n: usize,
    /// Columns of A and B.
    pub k: usize,
}

/// An expert layer: route, feed-forward, weighted sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Experts E.
    pub experts: usize,
    /// Model width H.
    pub hidden: usize,
    /// Expert width I.
    pub intermediate: usize,
    /// Experts of a token.
    pub top_k: usize,
}

/// The weights of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Sizes are rows of each expert.
    Gemm(GemmShape),
    /// Sizes are tokens.
    Layer(LayerShape),
}

impl Shape {
    /// `gemm` or `layer`.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Gemm(_) => "gemm",
            Self::Layer(_) => "layer",
        }
    }

    /// What sizes count.
    pub fn size_name(self) -> &'static str {
        match self {
            Self::Gemm(_) => "m",
            Self::Layer(_) => "T",
        }
    }

    /// Experts, then N and K or H and I.
    pub fn dimensions(self) -> [usize; 3] {
        match self {
            Self::Gemm(GemmShape { experts, n, k }) => [experts, n, k],
            Self::Layer(shape) => [shape.experts, shape.hidden, shape.intermediate],
        }
    }

    /// A name for files: `gemm-32x4096x2048`.
    pub fn slug(self) -> String {
        let [a, b, c] = self.dimensions();
        format!("{}-{a}x{b}x{c}", self.kind())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gemm(GemmShape { experts, n, k }) => {
                write!(f, "GEMM {experts} x [{n}, {k}]")
            }
            Self::Layer(shape) => write!(
                f,
                "layer E={} H={} I={} top {}",
                shape.experts, shape.hidden, shape.intermediate, shape.top_k
            ),
        }
    }
}

/// One set of weights, and the sizes to run on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its shape.
    pub shape: Shape,
    /// How its weights are stored.
    pub format: WeightFormat,
    /// Rows of each expert, or tokens.
    pub sizes: Vec<usize>,
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.shape, self.format)
    }
}

impl Block {
    /// One of the sizes.
    pub fn case(&self, size: usize) -> Case {
        Case {
            shape: self.shape,
            format: self.format,
            size,
        }
    }

    /// Bytes of one copy of the weights; scales of a GEMM, which lie elsewhere, not counted.
    pub fn weight_bytes(&self) -> usize {
        match self.shape {
            Shape::Gemm(GemmShape { experts, n, k }) => {
                let row_bytes = k * self.format.element_bytes();
                experts
                    * n.next_multiple_of(PANEL_ROWS)
                    * row_bytes.next_multiple_of(UNIT_ROW_BYTES)
            }
            Shape::Layer(shape) => shape.geometry(self.format).bank_bytes(),
        }
    }

    /// Bytes of inputs and outputs of the largest size, roughly.
    pub fn activation_bytes(&self) -> usize {
        let size = self.sizes.iter().copied().max().unwrap_or(0);
        match self.shape {
            // A and its packed copy, D in bf16.
            Shape::Gemm(GemmShape { experts, n, k }) => {
                let element_bytes = self.format.activation_bytes();
                experts * size * (2 * k * element_bytes + 2 * n)
            }
            // x and out in bf16; h and y of each routed row.
            Shape::Layer(shape) => {
                size * (4 * shape.hidden
                    + shape.top_k * (4 * shape.hidden + 2 * shape.intermediate))
            }
        }
    }
}

impl LayerShape {
    /// Its bank.
    pub fn geometry(self, format: WeightFormat) -> BankGeometry {
        BankGeometry {
            experts: self.experts,
            hidden: self.hidden,
            intermediate: self.intermediate,
            format,
            bias: false,
        }
    }
}

/// One thing that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Its shape.
    pub shape: Shape,
    /// How its weights are stored.
    pub format: WeightFormat,
    /// Rows of each expert, or tokens.
    pub size: usize,
}

impl Case {
    /// Operations of a call: two for each multiply-add.
    pub fn ops(&self) -> f64 {
        let products = match self.shape {
            Shape::Gemm(GemmShape { experts, n, k }) => experts * self.size * n * k,
            Shape::Layer(shape) => self.size * shape.top_k * 3 * shape.hidden * shape.intermediate,
        };
        2.0 * products as f64
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            shape,
            format,
            size,
        } = self;
        write!(f, "{shape} {format} {}={size}", shape.size_name())
    }
}
