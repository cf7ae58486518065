//! Every metric and event, named once.
