/**
 * The console under /console/: files alone. All that it shows comes from the public API, with the token that whoever uses it has typed in, so
 * these routes need no authentication and tell nothing.
 *
 * The policy allows no script and no style but files of this origin, no form target, no frame; and `require-trusted-types-for` makes every
 * way of parsing a string as HTML throw, so that hostile names of images and sandboxes cannot become elements even through a mistake.
 */
import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify';
import { type ConsoleFile, consoleFiles } from './console-files.ts';

const POLICY = [
  "default-src 'none'",
  "script-src 'self'",
  "style-src 'self'",
  // `data:` for pointers that machines show (noVNC): an image runs nothing and asks nobody.
  "img-src 'self' data:",
  "connect-src 'self'",
  "base-uri 'none'",
  "form-action 'none'",
  "frame-ancestors 'none'",
  "require-trusted-types-for 'script'",
  "trusted-types 'none'",
].join('; ');

const HEADERS = {
  'content-security-policy': POLICY,
  'x-content-type-options': 'nosniff',
  'x-frame-options': 'DENY',
  'referrer-policy': 'no-referrer',
  'cross-origin-opener-policy': 'same-origin',
  'cross-origin-resource-policy': 'same-origin',
  'permissions-policy': 'camera=(), geolocation=(), microphone=(), payment=(), usb=()',
  // Asked for again each time, answered with 304 while nothing changed: a new version is never half an old one.
  'cache-control': 'no-cache',
} as const;

/** Mounts the console on an app whose own API is at `/v1`. @throws CONSOLE_MISSING */
export function consoleRoutes(app: FastifyInstance): void {
  const files = consoleFiles();
  const toPage = (_request: FastifyRequest, reply: FastifyReply) => reply.redirect('/console/', 308);
  // Where somebody lands who has no more than the address.
  app.route({
    method: 'GET',
    url: '/',
    schema: { hide: true } as object,
    handler: (_request: FastifyRequest, reply: FastifyReply) => reply.redirect('/console/', 302),
  });
  app.route({ method: 'GET', url: '/console', schema: { hide: true } as object, handler: toPage });
  app.route<{ Params: { '*': string } }>({
    method: 'GET',
    url: '/console/*',
    schema: { hide: true } as object,
    handler: (request, reply) => {
      const file = files.get(request.params['*']);
      reply.headers(HEADERS);
      if (file === undefined) return reply.code(404).type('text/plain; charset=utf-8').send('There is no such file.\n');
      return send(file, request, reply);
    },
  });
}

function send(file: ConsoleFile, request: FastifyRequest, reply: FastifyReply): FastifyReply {
  reply.header('etag', file.etag);
  if (request.headers['if-none-match'] === file.etag) return reply.code(304).send();
  return reply.type(file.type).send(file.bytes);
}
