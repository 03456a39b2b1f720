/** What is put into a clipboard over HTTP is what was sent, or refused. */
import { expect, it } from 'vitest';
import { FullVmSandbox } from '#runtime';
import type { Sandboxes } from '../runtime-service/route.ts';
import { sandboxApp } from '../runtime-service/sandbox-routes.ts';

it('takes bytes, none of them too, and nothing that was read as something else', async () => {
  const put: string[] = [];
  const machine = Object.create(FullVmSandbox.prototype, {
    setClipboard: { value: async (_selection: string, { bytes }: { bytes: Buffer }) => put.push(String(bytes)) },
  }) as FullVmSandbox;
  const app = await sandboxApp({ get: () => machine } as unknown as Sandboxes);
  const send = (payload?: string, type?: string) =>
    app.inject({
      method: 'PUT',
      url: '/v1/sandboxes/desk/screen/clipboard',
      payload,
      headers: type === undefined ? {} : { 'content-type': type },
    });
  expect((await send('sent', 'application/octet-stream')).statusCode).toBe(200);
  expect((await send()).statusCode).toBe(200);
  for (const [payload, type] of [
    ['sent', 'text/plain'],
    ['"sent"', 'application/json'],
    ['null', 'application/json'],
  ] as const) {
    const answer = await send(payload, type);
    expect([answer.statusCode, answer.json().error.code], `${payload} ${type}`).toEqual([400, 'SANDBOX_BAD_REQUEST']);
  }
  expect(put).toEqual(['sent', '']);
  await app.close();
});
