/**
 * From a sandbox to an image of what it changed: the images it ran on, its upper, and `packDiff` over both. One that was kept is packed under
 * its lock; one that stays, and runs or is paused, by the service that has it, while its commands stand still.
 */
import { Type } from '@sinclair/typebox';
import { failPoint } from '#base';
import { CODEC_NAMES } from '#converter';
import { openImage, openStore, type PackDiffOptions, type PackedDiff, packDiff, sizesOf } from '#imagesvc';
import {
  composeLayers,
  type ImageReference,
  type NodeSandbox,
  type RuntimeFolders,
  type SandboxRecord,
  withKeptSandbox,
} from '#runtime';

export const PACK_KINDS = ['snapshot', 'workspace', 'toolkit'] as const;

export interface PackOptions
  extends Pick<PackDiffOptions, 'kind' | 'exclude' | 'policy' | 'compress' | 'progress' | 'signal'> {
  /** `NAME:TAG` of the new image. */
  readonly name: string;
  /** In place of the store the sandbox was started from. */
  readonly store?: string;
}

export interface PackSandboxOptions extends PackOptions {
  readonly sandbox: string;
  readonly folders?: Partial<RuntimeFolders>;
}

export interface PackedSandbox extends PackedDiff {
  /** What the sandbox ran on. Only the new layer is the image's own; these layers lie below it. */
  readonly composition: {
    readonly base: ImageReference;
    readonly workspace?: ImageReference;
    readonly toolkits: readonly ImageReference[];
  };
}

/** One that was kept. @throws RUNTIME_SANDBOX_*, CATALOG_*, LAYER_*, STORE_* */
export function packSandbox({ sandbox, folders, ...options }: PackSandboxOptions): Promise<PackedSandbox> {
  return withKeptSandbox(sandbox, (kept) => pack(kept, kept.upper, options), folders);
}

/** Files named in a note. */
const NAMED = 20;

/**
 * One that runs or is paused: it is as it was at one moment. What was open for writing then is in `notes`.
 * @throws RUNTIME_PAUSE_STUCK, RUNTIME_UNSUPPORTED, RUNTIME_SANDBOX_GONE, and as `packSandbox`
 */
export function packRunning(sandbox: NodeSandbox, options: PackOptions): Promise<PackedSandbox> {
  return sandbox.whileStill(async ({ record, upper, openFiles, done, signal }) => {
    const signals = options.signal === undefined ? signal : AbortSignal.any([signal, options.signal]);
    const packed = await pack(record, upper, { ...options, signal: signals }, done);
    const open = openFiles
      .slice(0, NAMED)
      .map(
        ({ path, program }) => `${path}: open for writing by ${program}; it is in the image as it was at that moment`,
      );
    const more = openFiles.length - open.length;
    return { ...packed, notes: [...packed.notes, ...open, ...(more > 0 ? [`and ${more} more open for writing`] : [])] };
  });
}

async function pack(
  sandbox: SandboxRecord,
  upperDir: string,
  { name, store: url, ...rest }: PackOptions,
  onRead?: () => void,
): Promise<PackedSandbox> {
  const store = await openStore(url ?? sandbox.store);
  // By digest: the names may have come to mean other images since.
  const open = (reference: { readonly digest: string }) => openImage(store, reference.digest);
  const base = await open(sandbox.base);
  const workspace = sandbox.workspace === undefined ? undefined : await open(sandbox.workspace);
  const toolkits = await Promise.all(sandbox.toolkits.map(open));
  const lowers = composeLayers({ base, workspace, toolkits });
  failPoint('pack-opened');
  const packed = await packDiff(store, {
    ...rest,
    name,
    upperDir,
    lowers,
    config: base.config,
    base: base.manifestDigest,
    onRead() {
      failPoint('pack-read');
      onRead?.();
    },
  });
  failPoint('pack-published');
  const composition = { base: sandbox.base, workspace: sandbox.workspace, toolkits: sandbox.toolkits };
  return { ...packed, composition };
}

/** As the command prints it with --json, and the service sends it. */
export function packedView({ name, digest, image, stats, notes, skipped, composition }: PackedSandbox) {
  return {
    name,
    digest,
    kind: image.kind,
    layers: image.layers.length,
    ownLayers: image.ownLayers,
    composition,
    stats,
    notes,
    skipped,
    ...sizesOf(image),
  };
}

export type PackedView = ReturnType<typeof packedView>;

/** What a request for it may say. */
export const PackBody = Type.Object(
  {
    name: Type.String({ minLength: 1, maxLength: 4096 }),
    store: Type.Optional(Type.String({ maxLength: 4096 })),
    kind: Type.Optional(Type.Union(PACK_KINDS.map((kind) => Type.Literal(kind)))),
    exclude: Type.Optional(Type.Array(Type.String({ maxLength: 4096 }), { maxItems: 1000 })),
    policy: Type.Optional(Type.Boolean()),
    compress: Type.Optional(Type.Union(CODEC_NAMES.map((codec) => Type.Literal(codec)))),
  },
  { additionalProperties: false },
);
