//! stub until the real one is merged
use super::{Db, StoreError};
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    Lean,
    Shared,
}
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    pub rejected_columns: bool,
    pub profile: Profile,
    pub can_delete: bool,
}
impl Shape {
    pub fn describe(&self) -> String {
        format!("{self:?}")
    }
    pub fn warnings(&self, _retention: bool) -> Vec<String> {
        Vec::new()
    }
}
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    #[error("{0}")]
    Store(#[from] StoreError),
    #[error("{0}")]
    Schema(String),
}
pub async fn inspect(_db: &Db, _schema: &str, _table: &str) -> Result<Shape, InspectError> {
    Ok(Shape { rejected_columns: true, profile: Profile::Shared, can_delete: true })
}
