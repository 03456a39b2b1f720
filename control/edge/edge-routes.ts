/** What an edge answers beside the routes of single sandboxes: whether it takes more, what it has. The same for real and simulated edges. */
import { Type } from '@sinclair/typebox';
import type { HttpApp } from '#imagesvc';
import { reportToJson } from '../placement/report-json.ts';
import type { EdgeHost } from './edge-host.ts';

const RosterQuery = Type.Object(
  { name: Type.Optional(Type.String({ minLength: 1, maxLength: 200 })) },
  { additionalProperties: false },
);
const DrainBody = Type.Object({ on: Type.Boolean() }, { additionalProperties: false });

export function edgeRoutes(app: HttpApp, host: EdgeHost): void {
  app.get('/v1/report', { config: { hot: true } }, async () => reportToJson(host.report()));
  app.get(
    '/v1/roster',
    { config: { hot: true }, schema: { querystring: RosterQuery } },
    async ({ query: { name } }) => {
      const roster = host.roster();
      if (name === undefined) return roster;
      return { ...roster, sandboxes: roster.sandboxes.filter((row) => row.name === name) };
    },
  );
  app.post('/v1/drain', { schema: { body: DrainBody } }, async ({ body }) => {
    host.drain(body.on);
    return { edge: host.edge, draining: body.on };
  });
}
