// What both peers share: a service that answers 200 bytes, with and without the library in front of its handler.
import express from 'express';

const ANSWER = 'a'.repeat(200);

/** `middleware` guards /pay; /bare is the same handler without it; /count tells how often either ran. */
export function serve(middleware, isReplayed = () => false) {
  let count = 0;
  const handler = async (request, response) => {
    if (isReplayed(request)) return;
    count += 1;
    const work = Number(request.get('x-work-ms') ?? 0);
    if (work > 0) await new Promise((resolve) => setTimeout(resolve, work));
    response.type('text/plain').send(ANSWER);
  };
  const app = express();
  app.disable('x-powered-by');
  app.disable('etag');
  app.use(express.text({ type: () => true, limit: '2mb' }));
  app.get('/count', (_, response) => response.send(String(count)));
  app.post('/bare', handler);
  app.post('/pay', middleware, handler);
  // The libraries refuse by an error, with the status set before or carried by it.
  app.use((error, _request, response, _next) => {
    const status = response.statusCode >= 400 ? response.statusCode : (error.status ?? 500);
    response.status(status).send(error.message);
  });
  const server = app.listen(Number(process.env.PORT), '127.0.0.1');
  server.keepAliveTimeout = 60_000;
}
