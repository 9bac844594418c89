//! A service that answers 200 bytes behind axum-idempotent, and the same without it. `STORE=redis` keeps the sessions in
//! Redis, which must be 7.4 or newer (`HEXPIRE`); otherwise they are in this process.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::HeaderMap;
use axum::routing::{get, post};
use axum_idempotent::{IdempotentLayer, IdempotentOptions};
use fred::interfaces::ClientLike;
use ruts::store::moka::MokaStore;
use ruts::store::redis::RedisStore;
use ruts::store::{SessionStore, Ttl};
use ruts::{CookieOptions, Session, SessionLayer};
use tower_cookies::CookieManagerLayer;

const ANSWER: [u8; 200] = [b'a'; 200];

static COUNT: AtomicU64 = AtomicU64::new(0);

async fn handler(
    headers: HeaderMap,
    _body: axum::body::Bytes,
) -> ([(&'static str, &'static str); 1], &'static [u8]) {
    COUNT.fetch_add(1, Ordering::Relaxed);
    let work =
        headers.get("x-work-ms").and_then(|value| value.to_str().ok()).and_then(|text| text.parse().ok());
    if let Some(millis) = work {
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }
    ([("content-type", "text/plain")], &ANSWER)
}

/// The library keeps answers in a session, which the application must have begun.
async fn begin_session<S: SessionStore>(session: Session<S>) -> &'static str {
    let hour = Ttl::new(3600).ok();
    match hour {
        Some(hour) if session.set("user", &"bench", hour, None).await.is_ok() => "begun",
        _ => "no session",
    }
}

fn app<S: SessionStore>(store: Arc<S>) -> Router {
    let options = IdempotentOptions::default()
        .use_idempotency_key_header(Some("idempotency-key"), true)
        .expire_after(3600);
    let cookies = CookieOptions::build().name("session").max_age(3600).path("/");
    Router::new()
        .route("/pay", post(handler))
        .layer(IdempotentLayer::<S>::new(options))
        .route("/session", post(begin_session::<S>))
        .layer(SessionLayer::new(store).with_cookie_options(cookies))
        .layer(CookieManagerLayer::new())
        .route("/bare", post(handler))
        .route("/count", get(|| async { COUNT.load(Ordering::Relaxed).to_string() }))
}

// One thread, as one worker of Envoy and one process of Node.js have.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let app = if std::env::var("STORE").as_deref() == Ok("redis") {
        let client = fred::clients::Client::new(
            fred::types::config::Config::from_url(&std::env::var("REDIS_URL")?)?,
            None,
            None,
            None,
        );
        client.init().await?;
        app(Arc::new(RedisStore::new(Arc::new(client)).await?))
    } else {
        app(Arc::new(MokaStore::builder().build()))
    };
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", std::env::var("PORT")?.parse()?)).await?;
    axum::serve(listener, app).await?;
    Ok(())
}
