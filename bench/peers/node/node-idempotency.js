// @node-idempotency/core with its Redis adapter. It has no adapter for Express: this one does what its own for other
// frameworks do, ask before the handler and store what the handler sends.
import { Idempotency, IdempotencyErrorCodes } from '@node-idempotency/core';
import { RedisStorageAdapter } from '@node-idempotency/storage-adapter-redis';

import { serve } from './service.js';

const storage = new RedisStorageAdapter({ url: process.env.REDIS_URL });
await storage.connect();
const idempotency = new Idempotency(storage, { cacheTTLMS: 86_400_000 });

const STATUS = {
  [IdempotencyErrorCodes.REQUEST_IN_PROGRESS]: 409,
  [IdempotencyErrorCodes.IDEMPOTENCY_FINGERPRINT_MISSMATCH]: 422,
};

serve(async (request, response, next) => {
  const asked = { headers: request.headers, path: request.path, body: request.body, method: request.method };
  let found;
  try {
    found = await idempotency.onRequest(asked);
  } catch (error) {
    error.status = STATUS[error.code] ?? 400;
    return next(error);
  }
  if (found) {
    return response.set('idempotency-replayed', 'true').status(found.additional.status).send(found.body);
  }
  const send = response.send.bind(response);
  response.send = (body) => {
    response.send = send;
    // The record is there before the answer goes.
    idempotency.onResponse(asked, { body, additional: { status: response.statusCode } }).then(() => send(body), next);
    return response;
  };
  next();
});
