//! Each example runs to its end; their assertions are the tests.

#[path = "../examples/batched.rs"]
mod batched;
#[cfg(feature = "cuda")]
#[path = "../examples/embed_in_your_engine.rs"]
mod embed_in_your_engine;
#[path = "../examples/grouped_moe.rs"]
mod grouped_moe;
#[path = "../examples/single.rs"]
mod single;

#[test]
fn single_runs() {
    single::main().unwrap();
}

#[test]
fn batched_runs() {
    batched::main().unwrap();
}

#[test]
fn grouped_moe_runs() {
    grouped_moe::main().unwrap();
}

#[cfg(feature = "cuda")]
#[test]
fn embed_in_your_engine_runs() {
    embed_in_your_engine::main().unwrap();
}
