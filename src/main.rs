//! The binary: everything is in the library.

fn main() -> std::process::ExitCode {
    keiro_relay::cli::main()
}
