// express-idempotency with express-idempotency-redis-adapter, set up as its README does.
import { getSharedIdempotencyService, idempotency } from 'express-idempotency';
import adapter from 'express-idempotency-redis-adapter';

import { serve } from './service.js';

const RedisAdapter = adapter.default ?? adapter;
const dataAdapter = new RedisAdapter({ connectionConfig: { url: process.env.REDIS_URL } });
await dataAdapter.connect();
serve(idempotency({ dataAdapter }), (request) => getSharedIdempotencyService().isHit(request));
