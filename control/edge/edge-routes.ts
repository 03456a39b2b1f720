/** What an edge answers beside the routes of single sandboxes: whether it takes more, what it has. The same for real and simulated edges. */
import { Type } from '@sinclair/typebox';
import type { HttpApp } from '#imagesvc';
import { reportToJson } from '../placement/report-json.ts';
import type { EdgeHost } from './edge-host.ts';

const DrainBody = Type.Object({ on: Type.Boolean() }, { additionalProperties: false });

export function edgeRoutes(app: HttpApp, host: EdgeHost): void {
  app.get('/v1/report', { config: { hot: true } }, async () => reportToJson(host.report()));
  app.get('/v1/roster', { config: { hot: true } }, async () => host.roster());
  app.post('/v1/drain', { schema: { body: DrainBody } }, async ({ body }) => {
    host.drain(body.on);
    return { edge: host.edge, draining: body.on };
  });
}
