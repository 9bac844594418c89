//! The Envoy parts of `envoy/istio/` and `envoy/envoy-gateway/`, put into an Envoy as their control planes put them.

use std::path::Path;

use serde_json::{Value, json};
use serde_json_path::JsonPath;

use crate::support::*;

const HCM: &str = "envoy.filters.network.http_connection_manager";
const ROUTER: &str = "envoy.filters.http.router";
const RBAC: &str = "envoy.filters.http.rbac";
const WASM_TYPE: &str = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm";
const FILTERS: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";

/// An authorization whose grants can be revoked: by a header, here.
fn authorization() -> Value {
    let revoked = json!({"permissions": [{"any": true}], "principals": [{"header": {"name": "x-revoked", "present_match": true}}]});
    json!({"name": RBAC, "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC",
        "rules": {"action": "DENY", "policies": {"revoked": revoked}},
    }})
}

fn router() -> Value {
    json!({"name": ROUTER, "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}})
}

/// A gateway as a control plane makes it, before anything of ours.
fn gateway(origin: &Origin, filters: Vec<Value>) -> Value {
    json!({
        "node": {"id": "gateway", "cluster": "gateway"},
        "admin": {"address": {}},
        "static_resources": {
            "listeners": [{
                "name": "ingress",
                "address": {"socket_address": {"address": "127.0.0.1", "port_value": 8080}},
                "filter_chains": [{"filters": [{"name": HCM, "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
                    "stat_prefix": "ingress",
                    "http_filters": filters,
                    "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [
                        {"name": "payments", "match": {"prefix": "/"}, "route": {"cluster": "origin"}},
                    ]}]},
                }}]}],
            }],
            "clusters": [envoy::config::cluster("origin", origin.addr(), false)],
        },
    })
}

fn filters(bootstrap: &mut Value) -> &mut Vec<Value> {
    bootstrap.pointer_mut(FILTERS).unwrap().as_array_mut().unwrap()
}

fn filter_names(bootstrap: &mut Value) -> Vec<String> {
    filters(bootstrap).iter().map(|filter| filter["name"].as_str().unwrap().to_owned()).collect()
}

fn insert_before_the_router(bootstrap: &mut Value, filter: Value) {
    let filters = filters(bootstrap);
    let router = filters.iter().position(|filter| filter["name"] == ROUTER).unwrap();
    filters.insert(router, filter);
}

fn the_only(documents: &[Value], kind: &str) -> Value {
    let mut of_kind = documents.iter().filter(|document| document["kind"] == kind);
    let document = of_kind.next().unwrap_or_else(|| panic!("no {kind}"));
    assert!(of_kind.next().is_none(), "more than one {kind}");
    document.clone()
}

/// What the agent beside Istio's Envoy does with an image: it becomes a file.
fn pull_the_image(wasm: &mut Value) {
    assert_eq!(wasm["@type"], WASM_TYPE);
    let code = &mut wasm["config"]["vm_config"]["code"];
    assert_eq!(code["remote"]["http_uri"]["uri"], "oci://REGISTRY/envoy-idempotency:VERSION");
    assert!(
        code["remote"]["http_uri"]["cluster"].is_string()
            && code["remote"]["http_uri"]["timeout"].is_string()
    );
    assert_eq!(code["remote"]["sha256"].as_str().map(str::len), Some(64));
    *code = json!({"local": {"filename": Wasm::Dist.path()}});
}

/// The resources that `istiod` would serve come from files.
fn discover_in(folder: &Path, value: &mut Value) {
    if let Some(source) = value.pointer_mut("/config_discovery/config_source") {
        // Until the module is there the listener does not open.
        assert_eq!(*source, json!({"ads": {}, "initial_fetch_timeout": "0s"}));
        let file = folder.join(value["name"].as_str().unwrap());
        assert!(file.is_file(), "no EXTENSION_CONFIG {}", value["name"]);
        value["config_discovery"]["config_source"] = json!({"resource_api_version": "V3", "path_config_source": {"path": file}, "initial_fetch_timeout": "0s"});
    }
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| discover_in(folder, item)),
        Value::Object(fields) => fields.values_mut().for_each(|field| discover_in(folder, field)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Applies an EnvoyFilter to a gateway, in the order of its patches.
fn apply_envoy_filter(bootstrap: &mut Value, document: &Value, folder: &Path) {
    for entry in document["spec"]["configPatches"].as_array().unwrap() {
        let (found, patch) = (&entry["match"], &entry["patch"]);
        let mut value = patch["value"].clone();
        let is_gateway = found["context"] == "GATEWAY";
        match (entry["applyTo"].as_str().unwrap(), patch["operation"].as_str().unwrap()) {
            ("EXTENSION_CONFIG", "ADD") => {
                pull_the_image(&mut value["typed_config"]);
                let name = value["name"].as_str().unwrap().to_owned();
                value["@type"] = json!("type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig");
                std::fs::write(folder.join(name), json!({"resources": [value]}).to_string()).unwrap();
            }
            ("HTTP_FILTER", "INSERT_BEFORE") if is_gateway => {
                let chain = &found["listener"]["filterChain"]["filter"];
                assert_eq!((&chain["name"], &chain["subFilter"]["name"]), (&json!(HCM), &json!(ROUTER)));
                assert_eq!(found["listener"]["portNumber"], 8080);
                insert_before_the_router(bootstrap, value);
            }
            ("LISTENER", "MERGE") if is_gateway => {
                assert_eq!(found["listener"]["portNumber"], 8080);
                deep_merge(&mut bootstrap["static_resources"]["listeners"][0], &value);
            }
            ("LISTENER", "ADD") if is_gateway => {
                bootstrap["static_resources"]["listeners"].as_array_mut().unwrap().push(value);
            }
            ("CLUSTER", "ADD") if is_gateway => {
                bootstrap["static_resources"]["clusters"].as_array_mut().unwrap().push(value);
            }
            other => panic!("{other:?}: {found}"),
        }
    }
    discover_in(folder, bootstrap);
}

fn with_internal_listeners(bootstrap: &mut Value) {
    bootstrap["bootstrap_extensions"] = json!([{
        "name": "envoy.bootstrap.internal_listener",
        "typed_config": {"@type": "type.googleapis.com/envoy.extensions.bootstrap.internal_listener.v3.InternalListener"},
    }]);
}

/// So long that a busy machine is no store failure, and the link's socket is this Envoy's own.
fn unhurried_link(bootstrap: &mut Value, redis: &Redis) {
    move_cluster(bootstrap, "idempotency-redis", redis.addr());
    replace_text(bootstrap, "@idempotency-redis", &format!("@idempotency-test-{}", unique_key()));
    let listeners = bootstrap["static_resources"]["listeners"].as_array_mut().unwrap();
    let proxy = listeners.iter_mut().find(|listener| listener["name"] == "idempotency_redis_proxy").unwrap();
    let settings = &mut proxy["filter_chains"][0]["filters"][0]["typed_config"]["settings"];
    assert_eq!(settings["op_timeout"], "0.1s");
    settings["op_timeout"] = json!("3s");
}

/// One keyed request runs once, its retry is replayed, another body is a mismatch, and a revoked grant ends all that.
async fn protects(envoy: &Shipped, origin: &Origin) {
    let key = unique_key();
    let request = Request::post("/payments").key(&key).body("amount=1");
    let first = send_once(envoy.addr(), Protocol::Http1, &request).await.unwrap();
    assert_eq!((first.status, first.header("idempotent-replayed")), (200, None), "{first:?}");
    let retry = send_once(envoy.addr(), Protocol::Http1, &request).await.unwrap();
    assert_eq!((retry.status, retry.header("idempotent-replayed")), (200, Some("true")), "{retry:?}");
    assert_eq!(retry.body, first.body);
    let other = Request::post("/payments").key(&key).body("amount=2");
    let other = send_once(envoy.addr(), Protocol::Http1, &other).await.unwrap();
    assert_eq!(other.kind(), (422, Some("mismatch".to_owned())));
    let revoked = request.header("x-revoked", "1");
    let revoked = send_once(envoy.addr(), Protocol::Http1, &revoked).await.unwrap();
    assert_eq!((revoked.status, revoked.text().as_str()), (403, "RBAC: access denied"));
    assert_eq!(origin.executions_of(&key), 1);
    // What no rule covers passes.
    let uncovered = send_once(envoy.addr(), Protocol::Http1, &Request::post("/other")).await.unwrap();
    assert_eq!(uncovered.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn istios_envoy_filter_protects_on_each_store() {
    let (origin, redis) = (Origin::start().await, Redis::start().await);
    for file in ["envoyfilter-embedded.yaml", "envoyfilter-redis.yaml"] {
        let documents = documents_of(&format!("envoy/istio/{file}"));
        let folder = tempfile::tempdir().unwrap();
        let mut bootstrap = gateway(&origin, vec![authorization(), router()]);
        let mut document = the_only(&documents, "EnvoyFilter");
        if file.contains("redis") {
            replace_text(&mut document, "\"timeout\": \"250ms\"", "\"timeout\": \"8s\"");
            // Istio's own bootstrap has it.
            with_internal_listeners(&mut bootstrap);
        }
        apply_envoy_filter(&mut bootstrap, &document, folder.path());
        assert_eq!(filter_names(&mut bootstrap), [RBAC, "idempotency", ROUTER]);
        if file.contains("redis") {
            unhurried_link(&mut bootstrap, &redis);
        }
        let envoy = Shipped::start(bootstrap, &[]).await;
        protects(&envoy, &origin).await;
        // Below the filter nothing resends.
        let route = &the_only(&documents, "VirtualService")["spec"]["http"][0];
        assert_eq!(route["retries"], json!({"attempts": 0}));
    }
    assert!(redis.command("KEYS *").await.contains("idem:"));
}

/// A filter as `istiod` makes it of these fields, which can't name the setting that lets the body be read.
fn filter_of_istiod(document: &Value, wasm: &Value) -> Value {
    let policy = match wasm["failStrategy"].as_str() {
        Some("FAIL_RELOAD") => "FAIL_RELOAD",
        other => panic!("failStrategy: {other:?}"),
    };
    assert_eq!(wasm["url"], "oci://REGISTRY/envoy-idempotency:VERSION");
    let name = format!(
        "{}.{}",
        document["metadata"]["namespace"].as_str().unwrap(),
        document["metadata"]["name"].as_str().unwrap()
    );
    json!({"name": name, "typed_config": {"@type": WASM_TYPE, "config": {
        "name": name,
        "root_id": wasm["pluginName"],
        "failure_policy": policy,
        "vm_config": {"runtime": "envoy.wasm.runtime.v8", "code": {"local": {"filename": Wasm::Dist.path()}}},
        "configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": wasm["pluginConfig"].to_string()},
    }}})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn istios_plugins_protect_what_the_head_tells() {
    let origin = Origin::start().await;
    let plugin = documents_of("envoy/istio/wasmplugin.yaml").remove(0);
    let extension = documents_of("envoy/istio/trafficextension.yaml").remove(0);
    assert_eq!(
        (&plugin["spec"]["phase"], &extension["spec"]["phase"]),
        (&json!("UNSPECIFIED_PHASE"), &json!("UNSPECIFIED"))
    );
    for (document, wasm) in [(&plugin, &plugin["spec"]), (&extension, &extension["spec"]["wasm"])] {
        let mut bootstrap = gateway(&origin, vec![authorization(), router()]);
        insert_before_the_router(&mut bootstrap, filter_of_istiod(document, wasm));
        let envoy = Shipped::start(bootstrap, &[]).await;
        let key = unique_key();
        let paying = |body: &str, digest: &str| {
            Request::post("/payments").key(&key).header("content-digest", digest).body(body)
        };
        let first =
            send_once(envoy.addr(), Protocol::Http1, &paying("amount=1", "sha-256=:MQ==:")).await.unwrap();
        assert_eq!((first.status, first.header("idempotent-replayed")), (200, None), "{first:?}");
        // The limit that the files tell: without a digest of its own another body is not told from it.
        let retry =
            send_once(envoy.addr(), Protocol::Http1, &paying("amount=2", "sha-256=:MQ==:")).await.unwrap();
        assert_eq!(
            (retry.status, retry.header("idempotent-replayed"), &retry.body),
            (200, Some("true"), &first.body)
        );
        let other =
            send_once(envoy.addr(), Protocol::Http1, &paying("amount=2", "sha-256=:Mg==:")).await.unwrap();
        assert_eq!(other.kind(), (422, Some("mismatch".to_owned())));
        let revoked = paying("amount=1", "sha-256=:MQ==:").header("x-revoked", "1");
        assert_eq!(send_once(envoy.addr(), Protocol::Http1, &revoked).await.unwrap().status, 403);
        assert_eq!(origin.executions_of(&key), 1);
    }
}

/// Envoy Gateway's `filterOrder`: each entry moves the filters of one type behind the last one of another, if there is one.
fn reorder(filters: &mut Vec<Value>, order: &Value) {
    let is =
        |filter: &Value, kind: &Value| filter["name"].as_str().unwrap().starts_with(kind.as_str().unwrap());
    for entry in order.as_array().unwrap() {
        if !filters.iter().any(|filter| is(filter, &entry["after"])) {
            continue;
        }
        let (moved, mut rest): (Vec<Value>, Vec<Value>) =
            filters.drain(..).partition(|filter| is(filter, &entry["name"]));
        let at = rest.iter().rposition(|filter| is(filter, &entry["after"])).unwrap() + 1;
        rest.splice(at..at, moved);
        *filters = rest;
    }
}

/// Applies the patches of an EnvoyPatchPolicy: `add` below what a JSONPath finds, or of a whole resource.
fn apply_patch_policy(bootstrap: &mut Value, document: &Value, listener: &str) {
    for patch in document["spec"]["jsonPatches"].as_array().unwrap() {
        let (name, operation) = (patch["name"].as_str().unwrap(), &patch["operation"]);
        assert_eq!(operation["op"], "add");
        let resources = match patch["type"].as_str().unwrap() {
            "type.googleapis.com/envoy.config.listener.v3.Listener" => {
                &mut bootstrap["static_resources"]["listeners"]
            }
            "type.googleapis.com/envoy.config.cluster.v3.Cluster" => {
                &mut bootstrap["static_resources"]["clusters"]
            }
            other => panic!("{other}"),
        };
        let resources = resources.as_array_mut().unwrap();
        let (path, value) = (operation["path"].as_str().unwrap(), operation["value"].clone());
        if path.is_empty() {
            assert_eq!(value["name"], name);
            resources.push(value);
            continue;
        }
        assert_eq!(name, listener);
        let target = &mut resources[0];
        let places = match operation["jsonPath"].as_str() {
            None => vec![String::new()],
            Some(expression) => {
                let expression = JsonPath::parse(expression).unwrap();
                expression.query_located(target).locations().map(|place| place.to_json_pointer()).collect()
            }
        };
        assert!(!places.is_empty(), "{operation} finds nothing");
        for place in places {
            target.pointer_mut(&place).unwrap()[path.strip_prefix('/').unwrap()] = value.clone();
        }
    }
}

/// The filter that Envoy Gateway makes of an EnvoyExtensionPolicy, off but on the routes that it targets.
fn filter_of_envoy_gateway(policy: &Value) -> Value {
    let (metadata, wasm) = (&policy["metadata"], &policy["spec"]["wasm"][0]);
    let (namespace, name) = (metadata["namespace"].as_str().unwrap(), metadata["name"].as_str().unwrap());
    let unique = format!("envoyextensionpolicy/{namespace}/{name}/wasm/0");
    assert_eq!(wasm["code"]["image"]["url"], "REGISTRY/envoy-idempotency:VERSION");
    json!({"name": format!("envoy.filters.http.wasm/{unique}"), "disabled": true, "typed_config": {"@type": WASM_TYPE, "config": {
        "name": wasm["name"],
        "root_id": wasm["rootID"],
        "fail_open": wasm["failOpen"],
        "vm_config": {"vm_id": unique, "runtime": "envoy.wasm.runtime.v8", "code": {"local": {"filename": Wasm::Dist.path()}}},
        "configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": wasm["config"].to_string()},
    }}})
}

/// The bootstrap of a proxy of Envoy Gateway under these three documents.
fn envoy_gateway(origin: &Origin, documents: &[Value]) -> Value {
    let compressor = json!({"name": "envoy.filters.http.compressor", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.compressor.v3.Compressor",
        "compressor_library": {"name": "gzip", "typed_config": {"@type": "type.googleapis.com/envoy.extensions.compression.gzip.compressor.v3.Gzip"}},
    }});
    let filter = filter_of_envoy_gateway(&the_only(documents, "EnvoyExtensionPolicy"));
    let filter_name = filter["name"].as_str().unwrap().to_owned();
    // Its own order, from the client on.
    let mut bootstrap = gateway(origin, vec![filter, authorization(), compressor, router()]);
    let proxy = the_only(documents, "EnvoyProxy");
    reorder(filters(&mut bootstrap), &proxy["spec"]["filterOrder"]);
    if let Some(change) = proxy["spec"]["bootstrap"]["value"].as_str() {
        assert_eq!(proxy["spec"]["bootstrap"]["type"], "Merge");
        deep_merge(&mut bootstrap, &serde_saphyr::from_str(change).unwrap());
    }
    let hcm = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
    bootstrap.pointer_mut(hcm).unwrap()["route_config"]["virtual_hosts"][0]["routes"][0]["typed_per_filter_config"] = json!({&filter_name: {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "config": {}}});
    apply_patch_policy(&mut bootstrap, &the_only(documents, "EnvoyPatchPolicy"), "default/eg/http");
    assert_eq!(filter_names(&mut bootstrap), [RBAC, "envoy.filters.http.compressor", &filter_name, ROUTER]);
    bootstrap
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_gateways_policies_protect_on_each_store() {
    let (origin, redis) = (Origin::start().await, Redis::start().await);
    let embedded = envoy_gateway(&origin, &documents_of("envoy/envoy-gateway/embedded.yaml"));
    protects(&Shipped::start(embedded, &[]).await, &origin).await;

    let documents = documents_of("envoy/envoy-gateway/redis.yaml");
    let mut shared = envoy_gateway(&origin, &documents);
    let deployment = &the_only(&documents, "EnvoyProxy")["spec"]["provider"]["kubernetes"]["envoyDeployment"];
    let mounted = deployment["container"]["volumeMounts"][0]["mountPath"].as_str().unwrap().to_owned();
    replace_text(&mut shared, &format!("{mounted}/idempotency.wasm"), Wasm::Dist.path().to_str().unwrap());
    replace_text(&mut shared, "\"timeout\":\"250ms\"", "\"timeout\":\"8s\"");
    unhurried_link(&mut shared, &redis);
    protects(&Shipped::start(shared, &[]).await, &origin).await;
    assert!(redis.command("KEYS *").await.contains("idem:"));
}
