//! Searches documents for the filter, the chain it stands in, and everything that it may depend on.

use super::node::{Node, Value};

/// Everything of a file that matters to the filter.
#[derive(Debug, Default)]
pub struct Manifest {
    pub filters: Vec<Filter>,
    pub chains: Vec<Chain>,
    pub listeners: Vec<Placed>,
    pub clusters: Vec<Placed>,
    /// Route tables by themselves, and the patches and resources of a mesh that say how routes retry and mirror.
    pub routes: Vec<Placed>,
    pub has_internal_listener_extension: bool,
    /// Nothing comes from elsewhere: what is not in the file does not exist.
    pub is_closed: bool,
}

/// A node and where it is.
#[derive(Debug, Clone)]
pub struct Placed {
    pub path: String,
    pub node: Node,
}

impl Placed {
    pub fn name(&self) -> &str {
        self.node.text_of("name").unwrap_or_default()
    }
}

/// What an instance of the module is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Filter,
    /// A `request_end_hold` of a link.
    Hold,
}

/// Who runs the module, and so what can be set beside its configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Host {
    /// Envoy's own `envoy.filters.http.wasm`.
    Envoy,
    /// Istio's `WasmPlugin`.
    WasmPlugin,
    /// Envoy Gateway's `EnvoyExtensionPolicy`.
    ExtensionPolicy,
}

/// One instance of the module.
#[derive(Debug)]
pub struct Filter {
    pub name: String,
    pub role: Role,
    pub host: Host,
    pub path: String,
    /// Envoy's `PluginConfig`, or what stands for it in a resource.
    pub settings: Node,
    /// The plugin configuration as the filter gets it.
    pub configuration: Vec<u8>,
    pub line: usize,
    /// Which chain of the manifest, and which place in it.
    pub chain: Option<(usize, usize)>,
    /// How an EnvoyFilter patch puts it into a chain.
    pub patch_operation: Option<String>,
}

/// An HTTP filter chain: a connection manager.
#[derive(Debug)]
pub struct Chain {
    pub path: String,
    pub manager: Node,
    /// The listener it belongs to.
    pub listener: Option<Placed>,
}

impl Chain {
    /// The type of each filter's configuration, or its name where that says nothing, in order.
    pub fn kinds(&self) -> Vec<String> {
        self.manager
            .list("http_filters")
            .iter()
            .map(|filter| {
                let typed = filter.get("typed_config").and_then(Node::typed).map(|(kind, _)| kind.to_owned());
                typed.or_else(|| filter.text_of("name").map(str::to_owned)).unwrap_or_default()
            })
            .collect()
    }
}

impl Manifest {
    pub fn new(documents: Vec<Node>) -> Self {
        let several = documents.len() > 1;
        let mut manifest = Self { is_closed: documents.iter().all(is_closed), ..Self::default() };
        for (index, document) in documents.iter().enumerate() {
            let path = if several { format!("document {}: ", index + 1) } else { String::new() };
            manifest.document(document, &path);
        }
        manifest
    }

    pub fn cluster(&self, name: &str) -> Option<&Placed> {
        self.clusters.iter().find(|cluster| cluster.name() == name)
    }

    pub fn listener(&self, name: &str) -> Option<&Placed> {
        self.listeners.iter().find(|listener| listener.name() == name)
    }

    /// The chain of the listener at `path`.
    pub fn chain_of(&self, listener: &Placed) -> Option<&Chain> {
        let is_its = |chain: &&Chain| chain.listener.as_ref().is_some_and(|own| own.path == listener.path);
        self.chains.iter().find(is_its)
    }

    fn document(&mut self, document: &Node, path: &str) {
        match document.text_of("kind") {
            Some("WasmPlugin") => return self.wasm_plugin(document, path),
            Some("EnvoyExtensionPolicy") => return self.extension_policy(document, path),
            Some("VirtualService" | "HTTPRoute" | "BackendTrafficPolicy") => {
                self.routes.push(Placed { path: path.to_owned(), node: document.clone() });
                return;
            }
            Some("ConfigMap") => {
                for (name, text) in document.get("data").map_or(&[][..], Node::members) {
                    self.embedded(text, &format!("{path}data[\"{name}\"]: "));
                }
                return;
            }
            Some("EnvoyProxy") => {
                if let Some(bootstrap) = document.at(&["spec", "bootstrap", "value"]) {
                    self.embedded(bootstrap, &format!("{path}spec.bootstrap.value: "));
                }
            }
            Some(_) | None => {}
        }
        self.walk(document, path, &Around::default());
    }

    /// A text that is a file by itself; its lines are counted from its own line on.
    fn embedded(&mut self, text: &Node, path: &str) {
        for mut document in text.text().and_then(|text| Node::parse_all(text).ok()).unwrap_or_default() {
            shift(&mut document, text.line);
            self.document(&document, path);
        }
    }

    fn walk(&mut self, node: &Node, path: &str, around: &Around) {
        let mut around = around.clone();
        let placed = || Placed { path: path.to_owned(), node: node.clone() };
        match &node.value {
            Value::Map(members) => {
                if is_listener(node) {
                    self.listeners.push(placed());
                    around.listener = Some(placed());
                } else if is_cluster(node) {
                    self.clusters.push(placed());
                }
                if let Some(operation) = node.at(&["patch", "operation"]).and_then(Node::text) {
                    around.patch_operation = Some(operation.to_owned());
                }
                if node.get("virtual_hosts").is_some() || node.text_of("applyTo").is_some_and(is_route_patch)
                {
                    self.routes.push(placed());
                }
                if node.get("http_filters").is_some() {
                    around.chain = Some(self.chains.len());
                    self.chains.push(Chain {
                        path: path.to_owned(),
                        manager: node.clone(),
                        listener: around.listener.clone(),
                    });
                }
                if let Some((kind, typed)) = node.get("typed_config").and_then(Node::typed) {
                    match kind {
                        "Wasm" => self.wasm(node, typed, path, &around),
                        "InternalListener" => self.has_internal_listener_extension = true,
                        _ => {}
                    }
                }
                for (name, member) in members {
                    let path = join(path, name);
                    self.walk(member, &path, &around);
                }
            }
            Value::List(items) => {
                let in_chain = path.ends_with("http_filters") || path.ends_with("httpFilters");
                for (index, item) in items.iter().enumerate() {
                    around.place = if in_chain { Some(index) } else { around.place };
                    self.walk(item, &format!("{path}[{index}]"), &around);
                }
            }
            Value::Null | Value::Bool(_) | Value::Integer(_) | Value::Float(_) | Value::Text(_) => {}
        }
    }

    fn wasm(&mut self, filter: &Node, typed: &Node, path: &str, around: &Around) {
        let Some(settings) = typed.get("config") else { return };
        let (configuration, line) = configuration(settings).unwrap_or((Vec::new(), settings.line));
        let Some(role) = role_of(&configuration).or_else(|| names_us(settings).then_some(Role::Filter))
        else {
            return;
        };
        self.filters.push(Filter {
            name: filter.text_of("name").or(settings.text_of("name")).unwrap_or("wasm").to_owned(),
            role,
            host: Host::Envoy,
            path: path.to_owned(),
            settings: settings.clone(),
            configuration,
            line,
            chain: around.chain.zip(around.place),
            patch_operation: around.patch_operation.clone(),
        });
    }

    fn wasm_plugin(&mut self, document: &Node, path: &str) {
        let Some(spec) = document.get("spec") else { return };
        self.resource(document, spec, spec.get("pluginConfig"), Host::WasmPlugin, &format!("{path}spec"));
    }

    fn extension_policy(&mut self, document: &Node, path: &str) {
        for (index, wasm) in document.get("spec").map_or(&[][..], |spec| spec.list("wasm")).iter().enumerate()
        {
            let path = format!("{path}spec.wasm[{index}]");
            self.resource(document, wasm, wasm.get("config"), Host::ExtensionPolicy, &path);
        }
    }

    fn resource(&mut self, document: &Node, settings: &Node, config: Option<&Node>, host: Host, path: &str) {
        let configuration =
            config.map(|config| config.to_json().to_string().into_bytes()).unwrap_or_default();
        let role = role_of(&configuration).or_else(|| names_us(settings).then_some(Role::Filter));
        let Some(role) = role else { return };
        let name = document.at(&["metadata", "name"]).and_then(Node::text).unwrap_or("wasm");
        self.filters.push(Filter {
            name: name.to_owned(),
            role,
            host,
            path: path.to_owned(),
            settings: settings.clone(),
            configuration,
            line: config.map_or(settings.line, |config| config.line),
            chain: None,
            patch_operation: None,
        });
    }
}

/// What the walk has passed on its way down.
#[derive(Debug, Clone, Default)]
struct Around {
    listener: Option<Placed>,
    chain: Option<usize>,
    place: Option<usize>,
    patch_operation: Option<String>,
}

fn is_closed(document: &Node) -> bool {
    document.get("static_resources").is_some() && document.get("dynamic_resources").is_none()
}

fn is_listener(node: &Node) -> bool {
    let has = |name| node.get(name).is_some();
    has("filter_chains") || has("default_filter_chain") || (has("internal_listener") && has("name"))
}

fn is_cluster(node: &Node) -> bool {
    let has = |name| node.get(name).is_some();
    has("name")
        && (has("load_assignment")
            || has("cluster_type")
            || has("eds_cluster_config")
            || has("connect_timeout"))
}

fn is_route_patch(apply_to: &str) -> bool {
    matches!(apply_to, "HTTP_ROUTE" | "VIRTUAL_HOST" | "ROUTE_CONFIGURATION")
}

/// The plugin configuration of a `PluginConfig`, as the module is given it.
fn configuration(settings: &Node) -> Option<(Vec<u8>, usize)> {
    let (kind, typed) = settings.get("configuration")?.typed()?;
    match kind {
        "StringValue" => {
            let value = typed.get("value")?;
            Some((value.text()?.as_bytes().to_vec(), value.line))
        }
        "Struct" => {
            let value = typed.get("value").unwrap_or(typed);
            Some((value.to_json().to_string().into_bytes(), value.line))
        }
        _ => None,
    }
}

/// The role that a configuration says; `None` for the configuration of another module.
fn role_of(configuration: &[u8]) -> Option<Role> {
    let text = String::from_utf8_lossy(configuration);
    if text.contains("request_end_hold") {
        return Some(Role::Hold);
    }
    (text.contains("\"rules\"") && (text.contains("\"store\"") || text.contains("\"scope\"")))
        .then_some(Role::Filter)
}

/// Whether something that identifies the module has this filter's name in it.
fn names_us(settings: &Node) -> bool {
    let names = [
        settings.text_of("name"),
        settings.text_of("root_id"),
        settings.text_of("rootID"),
        settings.text_of("pluginName"),
        settings.text_of("url"),
        settings.at(&["vm_config", "code", "local", "filename"]).and_then(Node::text),
        settings.at(&["vm_config", "code", "remote", "http_uri", "uri"]).and_then(Node::text),
        settings.at(&["code", "image", "url"]).and_then(Node::text),
        settings.at(&["code", "http", "url"]).and_then(Node::text),
    ];
    names.iter().flatten().any(|name| name.contains("idempotency"))
}

fn shift(node: &mut Node, lines: usize) {
    node.line += lines;
    match &mut node.value {
        Value::List(items) => items.iter_mut().for_each(|item| shift(item, lines)),
        Value::Map(members) => members.iter_mut().for_each(|(_, member)| shift(member, lines)),
        Value::Null | Value::Bool(_) | Value::Integer(_) | Value::Float(_) | Value::Text(_) => {}
    }
}

fn join(path: &str, name: &str) -> String {
    let name = if name.contains(['.', ' ', '/']) { format!("[\"{name}\"]") } else { name.to_owned() };
    match path {
        "" => name,
        whole if whole.ends_with(": ") => format!("{whole}{name}"),
        rest if name.starts_with('[') => format!("{rest}{name}"),
        rest => format!("{rest}.{name}"),
    }
}
