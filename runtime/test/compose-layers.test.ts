import { describe, expect, it } from 'vitest';
import { digestOf } from '#base';
import type { ErofsLayer, Image, ImageKind } from '#imagesvc';
import { composeLayers } from '../compose/compose-layers.ts';

const layer = (name: string): ErofsLayer => ({
  meta: { mediaType: 'application/vnd.erofs', digest: digestOf(name), size: 1 },
  devices: [],
});
const image = (names: string[], ownLayers = names.length, kind: ImageKind = 'base'): Image => ({
  name: 'x:1',
  manifestDigest: digestOf(names.join()),
  manifestSize: 1,
  kind,
  layers: names.map(layer),
  ownLayers,
  base: undefined,
  config: layer('config').meta,
});
const compose = (base: Image, workspace?: Image, ...toolkits: Image[]) =>
  composeLayers({ base, workspace, toolkits }).map(({ meta }) => meta.digest);
const digests = (...names: string[]) => names.map(digestOf);

describe('composing layers', () => {
  it('is the base, then the workspace’s own, then each toolkit’s own, topmost last', () => {
    const workspace = image(['other base', 'W1', 'W2'], 2, 'workspace');
    const packed = image(['third base', 'T1'], 1, 'toolkit');
    expect(compose(image(['A', 'B']), workspace, image(['U1', 'U2']), packed)).toEqual(
      digests('A', 'B', 'W1', 'W2', 'U1', 'U2', 'T1'),
    );
  });

  it('gives a base-kind toolkit’s layers whole, without those that the base has already', () => {
    expect(compose(image(['debian', 'changes']), undefined, image(['debian', 'node']))).toEqual(
      digests('debian', 'changes', 'node'),
    );
  });

  it('keeps the first place of a layer that comes twice', () => {
    const tool = image(['T'], 1, 'toolkit');
    expect(compose(image(['A']), tool, tool, image(['U']), tool)).toEqual(digests('A', 'T', 'U'));
  });

  it('takes nothing from an image without layers of its own (an empty diff)', () => {
    expect(compose(image(['A']), image(['B', 'C'], 0, 'workspace'))).toEqual(digests('A'));
  });

  it('takes 500 layers and refuses 501, counting each once', () => {
    const names = Array.from({ length: 500 }, (_, i) => `L${i}`);
    expect(compose(image(names), image(names)).length).toBe(500);
    expect(() => compose(image(names), image(['one more']))).toThrow(
      expect.objectContaining({ code: 'RUNTIME_LAYER_LIMIT', message: expect.stringContaining('501') }),
    );
  });
});
