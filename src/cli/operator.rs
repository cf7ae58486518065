//! How operators' commands open the table.
//!
//! Nothing here ever asks for a right that the command does not use.

use super::{EXIT_CONFIG, EXIT_FAILED, complain};
use crate::config::Config;
use crate::store::{InspectError, Shape, Store, StoreError};

/// Why a command cannot begin: what to tell, and the exit code.
pub(super) type Refused = (String, u8);

/// Opens the table for a command that changes rows, or says why not and with which exit code.
pub(super) async fn open(config: &Config) -> Result<Store, u8> {
    let store = made(Store::new(config, 1)).map_err(told)?;
    let looked = store.inspect().await;
    adopted(store, looked).map_err(told)
}

/// Opens the table for a command that changes side tables only: the right to update rows is not asked for.
pub(super) async fn open_beside(config: &Config) -> Result<Store, u8> {
    let store = made(Store::new(config, 1)).map_err(told)?;
    let looked = store.inspect_to_read().await;
    adopted(store, looked).map_err(told)
}

/// Opens the table for a command that only looks; the server refuses every change.
pub(super) async fn open_to_look(config: &Config) -> Result<Store, Refused> {
    let store = made(Store::read_only(config))?;
    let looked = store.inspect_to_read().await;
    adopted(store, looked)
}

fn told((text, code): Refused) -> u8 {
    complain(&text);
    code
}

fn made(store: Result<Store, StoreError>) -> Result<Store, Refused> {
    store.map_err(|error| (error.to_string(), EXIT_CONFIG))
}

fn adopted(store: Store, looked: Result<Shape, InspectError>) -> Result<Store, Refused> {
    match looked {
        Ok(shape) => {
            store.adopt(&shape);
            Ok(store)
        }
        Err(problems @ InspectError::Problems(_)) => Err((problems.to_string(), EXIT_CONFIG)),
        Err(InspectError::Store(error)) => Err((error.to_string(), EXIT_FAILED)),
    }
}
