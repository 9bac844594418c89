//! The pages hold together: links and anchors, the commands and configurations that they show, the client's guide and the
//! filter's own refusals, and each German page and its original.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]
// A page has many more kinds of things than these tests read.
#![allow(clippy::wildcard_enum_match_arm)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use idempotency::config;
use idempotency::record::Reason;
use idempotency::reply::problem::Problem;
use pulldown_cmark::{CodeBlockKind, Event, LinkType, Options, Parser, Tag, TagEnd};
use saphyr::{LoadableYamlNode, Yaml};
use serde_json::Value;

/// A page as far as these tests look at it.
struct Page {
    /// From the repository's root.
    path: PathBuf,
    links: Vec<String>,
    /// Level and text.
    headings: Vec<(usize, String)>,
    /// The first word after the fence, and the text.
    code: Vec<(String, String)>,
    tables: Vec<Vec<Vec<String>>>,
    list_items: usize,
    /// The links of the first paragraph.
    first_links: Vec<String>,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl Page {
    fn parse(path: &Path) -> Page {
        let text = read(path);
        let mut page = Page {
            path: path.to_owned(),
            links: vec![],
            headings: vec![],
            code: vec![],
            tables: vec![],
            list_items: 0,
            first_links: vec![],
        };
        let mut paragraphs = 0;
        // What text goes into: a heading, a block of code, a cell.
        let mut here: Option<String> = None;
        for event in Parser::new_ext(&text, Options::ENABLE_TABLES) {
            match event {
                Event::Start(Tag::Link { link_type, dest_url, .. }) => {
                    assert_ne!(link_type, LinkType::Email, "{}: {dest_url}", path.display());
                    if paragraphs == 1 {
                        page.first_links.push(dest_url.to_string());
                    }
                    page.links.push(dest_url.to_string());
                }
                Event::Start(Tag::Image { dest_url, .. }) => page.links.push(dest_url.to_string()),
                Event::Start(Tag::Paragraph) => paragraphs += 1,
                Event::Start(Tag::Item) => page.list_items += 1,
                Event::Start(Tag::Heading { level, .. }) => {
                    page.headings.push((level as usize, String::new()));
                    here = Some(String::new());
                }
                Event::End(TagEnd::Heading(_)) => page.headings.last_mut().unwrap().1 = here.take().unwrap(),
                Event::Start(Tag::CodeBlock(kind)) => {
                    let fence = match kind {
                        CodeBlockKind::Fenced(fence) => fence.to_string(),
                        CodeBlockKind::Indented => String::new(),
                    };
                    let word = fence.split_whitespace().next().unwrap_or_default();
                    page.code.push((word.to_owned(), String::new()));
                    here = Some(String::new());
                }
                Event::End(TagEnd::CodeBlock) => page.code.last_mut().unwrap().1 = here.take().unwrap(),
                Event::Start(Tag::Table(_)) => page.tables.push(vec![]),
                Event::Start(Tag::TableHead | Tag::TableRow) => page.tables.last_mut().unwrap().push(vec![]),
                Event::Start(Tag::TableCell) => here = Some(String::new()),
                Event::End(TagEnd::TableCell) => {
                    page.tables.last_mut().unwrap().last_mut().unwrap().push(here.take().unwrap());
                }
                Event::Text(text) | Event::Code(text) => {
                    if let Some(here) = &mut here {
                        here.push_str(&text);
                    }
                }
                _ => {}
            }
        }
        page
    }

    /// The anchors of its headings, as GitHub makes them.
    fn anchors(&self) -> BTreeSet<String> {
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        let anchor = |(_, heading): &(usize, String)| {
            let kept = heading.to_lowercase();
            let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
            let count = seen.entry(anchor.clone()).and_modify(|count| *count += 1).or_insert(0);
            if *count == 0 { anchor } else { format!("{anchor}-{count}") }
        };
        self.headings.iter().map(anchor).collect()
    }

    fn name(&self) -> std::path::Display<'_> {
        self.path.display()
    }

    fn table(&self, first_header: &str) -> &[Vec<String>] {
        let found = self.tables.iter().find(|table| table[0][0] == first_header);
        &found.unwrap_or_else(|| panic!("{}: no table of {first_header}", self.name()))[1..]
    }
}

/// Every page of the repository that Git knows or could know.
fn pages() -> Vec<Page> {
    let mut folders = vec![PathBuf::new()];
    let mut pages = vec![];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root().join(&folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let path = folder.join(&name);
            let built = ["target", "dist", "node_modules", "artifacts"].contains(&name.as_str());
            if root().join(&path).is_dir() && !built && !name.starts_with('.') {
                folders.push(path);
            } else if name.ends_with(".md") {
                pages.push(Page::parse(&path));
            }
        }
    }
    assert!(pages.len() > 25, "only {} pages", pages.len());
    pages
}

fn page<'a>(pages: &'a [Page], path: &str) -> &'a Page {
    pages.iter().find(|page| page.path == Path::new(path)).unwrap_or_else(|| panic!("no page {path}"))
}

/// `link` as seen from `page`, without `.` and `..`.
fn resolve(page: &Path, link: &str) -> PathBuf {
    let mut resolved = page.parent().unwrap().to_owned();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => assert!(resolved.pop(), "{}: {link} leads out", page.display()),
            Component::CurDir => {}
            Component::Normal(part) => resolved.push(part),
            Component::RootDir | Component::Prefix(_) => panic!("{}: {link} is absolute", page.display()),
        }
    }
    resolved
}

#[test]
fn every_link_and_anchor_leads_somewhere() {
    let pages = pages();
    let mut anchors = 0;
    for page in &pages {
        for link in &page.links {
            let here = format!("{}: {link}", page.name());
            if let Some(rest) = link.strip_prefix("https://") {
                let host = rest.split('/').next().unwrap();
                assert!(host.contains('.') && !link.contains(char::is_whitespace), "{here}: not a link");
                continue;
            }
            assert!(!link.contains("://"), "{here}: only https leads outside");
            let (file, anchor) = link.split_once('#').map_or((link.as_str(), None), |(f, a)| (f, Some(a)));
            let target = if file.is_empty() { page.path.clone() } else { resolve(&page.path, file) };
            assert!(root().join(&target).exists(), "{here}: no such file");
            if let Some(anchor) = anchor {
                let target = pages.iter().find(|page| page.path == target);
                let known = target.unwrap_or_else(|| panic!("{here}: no page")).anchors();
                assert!(known.contains(anchor), "{here}: the anchors are {known:?}");
                anchors += 1;
            }
        }
    }
    assert!(anchors > 10, "only {anchors} anchors are linked");
}

#[test]
fn no_placeholder_is_left() {
    for page in pages() {
        assert!(!read(&page.path).contains("@@"), "{}", page.name());
    }
}

#[test]
fn the_index_leads_to_every_page() {
    let pages = pages();
    let index = page(&pages, "docs/README.md");
    let led: BTreeSet<PathBuf> =
        index.links.iter().map(|link| resolve(&index.path, link.split('#').next().unwrap())).collect();
    for page in pages.iter().filter(|page| page.path.starts_with("docs") && page.path != index.path) {
        let from_docs = page.path.strip_prefix("docs").unwrap().display();
        assert!(
            led.contains(&page.path),
            "docs/README.md has no row for [{}]({from_docs})",
            page.headings[0].1
        );
    }
}

/// The commands of the blocks marked `sh`: what they name exists.
#[test]
fn every_command_that_is_shown_exists() {
    let makefile = read("Makefile");
    let command = subcommands();
    let mut count = 0;
    for page in pages() {
        for (_, text) in page.code.iter().filter(|(fence, _)| fence == "sh") {
            for line in text.replace("\\\n", " ").lines() {
                let here = format!("{}: {line}", page.name());
                let line = line.split(" #").next().unwrap();
                let words: Vec<&str> = line.split_whitespace().collect();
                for pair in words.windows(2) {
                    if pair[0] == "make" && !pair[1].contains('=') {
                        let target = format!("{}:", pair[1]);
                        assert!(makefile.lines().any(|line| line.starts_with(&target)), "{here}: no target");
                        count += 1;
                    }
                    let program = pair[0].rsplit('/').next().unwrap();
                    if let (Some(command), "idempotency", Some(name)) =
                        (&command, program, pair[1].strip_prefix(|c: char| c.is_ascii_lowercase()))
                    {
                        let name = format!("{}{name}", &pair[1][..1]);
                        assert!(command.contains(&name), "{here}: the command has {command:?}");
                    }
                }
                for word in
                    words.iter().flat_map(|word| word.split(['"', '\'', '$', '(', ')', '<', '@', ':']))
                {
                    let folders =
                        ["src/", "tests/", "envoy/", "docs/", "scripts/", "examples/", "observability/"];
                    if folders.iter().any(|folder| word.starts_with(folder)) && !word.contains('*') {
                        assert!(root().join(word).exists(), "{here}: no {word}");
                        count += 1;
                    }
                }
            }
        }
    }
    assert!(count > 5, "only {count} targets and files are named");
}

/// The subcommands of the `idempotency` command, where this tree has it.
fn subcommands() -> Option<BTreeSet<String>> {
    let main = root().join("src/bin/idempotency/main.rs");
    if !main.exists() {
        return None;
    }
    let text = std::fs::read_to_string(main).unwrap();
    let body = text.split("(Subcommand").nth(1).or_else(|| text.split("Subcommand)]").nth(1)).unwrap();
    let body = body.split("\n}").next().unwrap();
    let variants =
        body.lines().map(str::trim).filter(|line| line.starts_with(|c: char| c.is_ascii_uppercase()));
    let kebab = |variant: &str| {
        let name: String = variant.chars().take_while(|c| c.is_alphanumeric()).collect();
        name.chars().enumerate().fold(String::new(), |mut kebab, (at, c)| {
            if c.is_uppercase() && at > 0 {
                kebab.push('-');
            }
            kebab.extend(c.to_lowercase());
            kebab
        })
    };
    Some(variants.map(kebab).chain(["help".to_owned()]).collect())
}

/// What a page shows as JSON: a whole plugin configuration, or a part of one that only lacks its rules or its store.
fn accepted(json: &str) -> Result<bool, String> {
    let mut value: Value = serde_json::from_str(json).map_err(|error| error.to_string())?;
    let Some(members) = value.as_object_mut() else { return Ok(false) };
    let known = ["store", "rules", "defaults", "role"];
    if !known.iter().any(|name| members.contains_key(*name)) {
        return Ok(false);
    }
    if !members.contains_key("role") {
        members.entry("store").or_insert_with(|| serde_json::json!({"shared_data": {}}));
        members
            .entry("rules")
            .or_insert_with(|| serde_json::json!([{"name": "a", "scope": [{"header": "x-account-id"}]}]));
    }
    let loaded = config::load_plugin(value.to_string().as_bytes());
    loaded.map(|_| true).map_err(|errors| errors.to_string())
}

#[test]
fn every_configuration_that_is_shown_is_accepted() {
    let mut count = 0;
    for page in pages() {
        for (_, json) in page.code.iter().filter(|(fence, _)| fence == "json") {
            count += usize::from(
                accepted(json).unwrap_or_else(|error| panic!("{}: {error}\n{json}", page.name())),
            );
        }
    }
    assert!(count > 8, "only {count} configurations are shown");
}

#[test]
fn every_yaml_that_is_shown_is_yaml_and_its_plugins_are_accepted() {
    let mut count = 0;
    for page in pages() {
        for (_, text) in page.code.iter().filter(|(fence, _)| ["yaml", "yml"].contains(&fence.as_str())) {
            let documents = Yaml::load_from_str(text);
            let documents = documents.unwrap_or_else(|error| panic!("{}: {error}\n{text}", page.name()));
            for json in documents.iter().flat_map(plugins) {
                let answer =
                    accepted(json).unwrap_or_else(|error| panic!("{}: {error}\n{json}", page.name()));
                count += usize::from(answer);
            }
        }
    }
    assert!(count > 0, "no plugin is shown in YAML");
}

/// The strings that are the `value` of a plugin's `configuration`.
fn plugins<'a>(node: &'a Yaml<'_>) -> Vec<&'a str> {
    let mut found = vec![];
    if let Some(configuration) =
        node.as_mapping_get("configuration").and_then(|node| node.as_mapping_get("value"))
    {
        found.extend(configuration.as_str());
    }
    if let Some(mapping) = node.as_mapping() {
        found.extend(mapping.values().flat_map(plugins));
    }
    if let Some(sequence) = node.as_sequence() {
        found.extend(sequence.iter().flat_map(plugins));
    }
    found
}

/// Those of the client's guide are run by `tests/e2e/client_guide.rs`; the others have to parse at least.
#[test]
fn every_python_that_is_shown_parses() {
    let pages = pages();
    let blocks: Vec<(String, &str)> = pages
        .iter()
        .flat_map(|page| page.code.iter().map(move |code| (page.name().to_string(), code)))
        .filter(|(_, (fence, _))| fence == "python")
        .map(|(name, (_, text))| (name, text.as_str()))
        .collect();
    assert!(blocks.len() > 3, "only {} blocks", blocks.len());
    let program = "import ast, json, sys\nfor name, text in json.loads(sys.argv[1]): ast.parse(text, name)";
    let blocks = serde_json::to_string(&blocks).unwrap();
    let output = std::process::Command::new("python3").args(["-c", program, &blocks]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// One of each kind.
fn problems() -> Vec<Problem> {
    vec![
        Problem::MissingKey { header: "idempotency-key".to_owned() },
        Problem::InvalidKey { why: String::new() },
        Problem::InvalidScope { why: String::new() },
        Problem::BodyTimeout,
        Problem::PayloadTooLarge { limit: 1 },
        Problem::InFlight { retry_after: 7 },
        Problem::Mismatch,
        Problem::Failed { reason: Reason::Status },
        Problem::Abandoned,
        Problem::ResponseNotKept { status: 200, headers: vec![] },
        Problem::StoreUnavailable,
        Problem::StoreFull,
        Problem::ExecutionUnavailable,
        Problem::Misconfigured,
    ]
}

/// In English and in German.
const GUIDES: [&str; 2] = ["docs/clients.md", "docs/de/clients.md"];

#[test]
fn the_guides_know_every_refusal_as_it_is() {
    let source = read("src/reply/problem.rs");
    let kinds = source.split("fn kind(").nth(1).unwrap().split("\n    }\n").next().unwrap();
    let kinds: BTreeSet<&str> =
        kinds.split("=> \"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    let problems = problems();
    assert_eq!(problems.iter().map(Problem::kind).collect::<BTreeSet<_>>(), kinds, "one of each kind");

    let minimal = br#"{"store": {"shared_data": {}}, "rules": [{"name": "a", "scope": "shared"}]}"#;
    let statuses = config::load(minimal).unwrap().statuses;
    let expected: Vec<[String; 3]> = problems
        .into_iter()
        .map(|problem| {
            let (kind, status) = (problem.kind(), problem.status(&statuses));
            let headers = problem.into_reply(&statuses, "https://api.example/").headers;
            let headers = String::from_utf8_lossy(&headers).into_owned();
            let wait =
                headers.split("retry-after\0").nth(1).map(|rest| rest.split('\0').next().unwrap().to_owned());
            [kind.to_owned(), status.to_string(), wait.unwrap_or_default()]
        })
        .collect();
    let pages = pages();
    for guide in GUIDES {
        let rows = page(&pages, guide).table("x-idempotency-refusal");
        let told: Vec<[String; 3]> = rows
            .iter()
            .map(|row| {
                let wait = match row[2].as_str() {
                    "no" | "nein" => "",
                    "1 s" => "1",
                    // The example of `problems` is in the range.
                    "1 to 30 s" | "1 bis 30 s" => "7",
                    other => panic!("{guide}: {other}"),
                };
                [row[0].clone(), row[1].clone(), wait.to_owned()]
            })
            .collect();
        assert_eq!(told, expected, "{guide}");

        let mut reasons: Vec<&str> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        reasons.push("abandoned");
        let told: Vec<&str> = page(&pages, guide).table("reason").iter().map(|row| row[0].as_str()).collect();
        assert_eq!(told, reasons, "{guide}");
    }
}

/// The values of the constants `…_HEADER` in the sources below `folder`.
fn headers_in(folder: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(headers_in(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(path).unwrap();
            let values = text.split("_HEADER: &str = \"").skip(1).map(|rest| rest.split('"').next().unwrap());
            found.extend(values.map(str::to_owned));
        }
    }
    found
}

/// What a client can meet, and nothing that the filter doesn't send.
#[test]
fn the_guides_name_the_filters_headers_and_no_others() {
    let own = |text: &str| -> BTreeSet<String> {
        let lower = text.to_lowercase();
        let words = lower.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        let ours = ["x-idempotency-", "idempotency-", "idempotent-"];
        words.filter(|word| ours.iter().any(|prefix| word.starts_with(prefix))).map(str::to_owned).collect()
    };
    // Told to services, on their own page.
    let to_services = "x-idempotency-attempt";
    let sent = headers_in(&root().join("src"));
    assert!(sent.contains(to_services) && sent.len() >= 3, "{sent:?}");
    let minimal = br#"{"store": {"shared_data": {}}, "rules": [{"name": "a", "scope": "shared"}]}"#;
    let rule = config::load(minimal).unwrap().rules.remove(0);
    let mut required: BTreeSet<String> =
        [rule.header.to_lowercase(), rule.replay_header.to_lowercase()].into();
    // The execution listener tells those to the filter, and nobody else.
    let to_clients = |name: &String| name != to_services && !name.starts_with("x-idempotency-execution-");
    required.extend(sent.into_iter().filter(to_clients));
    for guide in GUIDES {
        let told: BTreeSet<String> =
            own(&read(guide)).into_iter().filter(|word| !word.ends_with('-')).collect();
        let strange: Vec<&String> = told.iter().filter(|word| *word != to_services).collect();
        assert_eq!(strange, required.iter().collect::<Vec<_>>(), "{guide}");
    }
    for page in ["docs/partially-applied-handlers.md", "docs/de/partially-applied-handlers.md"] {
        assert!(read(page).contains(to_services), "{page} doesn't name {to_services}");
    }
}

#[test]
fn every_german_page_has_the_shape_of_its_original() {
    let pages = pages();
    let german: Vec<&Page> = pages.iter().filter(|page| page.path.starts_with("docs/de")).collect();
    assert_eq!(german.len(), 5, "{:?}", german.iter().map(|page| &page.path).collect::<Vec<_>>());
    for german in german {
        let name = german.path.file_name().unwrap().to_str().unwrap();
        let english = page(&pages, &format!("docs/{name}"));
        let here = format!("{} and {}", german.name(), english.name());
        assert_eq!(
            german.first_links,
            [format!("../{name}")],
            "{here}: the first paragraph names the original"
        );
        let levels = |page: &Page| page.headings.iter().map(|(level, _)| *level).collect::<Vec<_>>();
        assert_eq!(levels(german), levels(english), "{here}: headings");
        assert_eq!(german.list_items, english.list_items, "{here}: items of lists");
        let rows = |page: &Page| -> Vec<Vec<usize>> {
            page.tables.iter().map(|table| table.iter().map(Vec::len).collect()).collect()
        };
        assert_eq!(rows(german), rows(english), "{here}: rows and cells of tables");
        assert_eq!(german.code.len(), english.code.len(), "{here}: blocks of code");
        for (german, english) in german.code.iter().zip(&english.code) {
            assert_eq!(german, english, "{here}: code");
        }
    }
}
