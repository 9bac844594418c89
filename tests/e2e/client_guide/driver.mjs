// Sends intents, all at once, with the JavaScript code of docs/clients.md, and prints what came of each.
import { Rejected, Unsettled, send } from "./intent.mjs";

async function outcome({ url, key, body, headers, patience_ms: patience, timeout_ms: timeout, resent }) {
  try {
    const answer = await send(url, key, body, headers, { patience, timeout, resent });
    const replayed = answer.headers.get("idempotent-replayed") === "true";
    return { answer: answer.status, content: answer.content, replayed };
  } catch (error) {
    if (error instanceof Rejected) return { rejected: error.message };
    if (error instanceof Unsettled) return { unsettled: error.message };
    throw error;
  }
}

console.log(JSON.stringify(await Promise.all(JSON.parse(process.argv[2]).map(outcome))));
