//! Owns the deep merge that option patches are applied with.

use serde_json::Value;

/// Objects merge member by member; a `null` removes the member; anything else, arrays too, replaces.
pub fn deep_merge(target: &mut Value, patch: &Value) {
    match (target, patch) {
        (Value::Object(into), Value::Object(from)) => {
            for (name, value) in from {
                if value.is_null() {
                    into.remove(name);
                } else if value.is_object() {
                    let member =
                        into.entry(name.clone()).or_insert_with(|| Value::Object(Default::default()));
                    deep_merge(member, value);
                } else {
                    into.insert(name.clone(), value.clone());
                }
            }
        }
        (target, patch) => *target = patch.clone(),
    }
}
