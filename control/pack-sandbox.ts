/** From a kept sandbox to an image of what it changed: the images it ran on, its upper, and `packDiff` over both. */
import { openImage, openStore, type PackDiffOptions, type PackedDiff, packDiff } from '#imagesvc';
import { composeLayers, type ImageReference, type RuntimeFolders, withKeptSandbox } from '#runtime';

export interface PackSandboxOptions
  extends Pick<PackDiffOptions, 'kind' | 'exclude' | 'policy' | 'compress' | 'progress' | 'signal'> {
  readonly sandbox: string;
  /** `NAME:TAG` of the new image. */
  readonly name: string;
  /** In place of the store the sandbox was started from. */
  readonly store?: string;
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

/** @throws RUNTIME_SANDBOX_*, CATALOG_*, LAYER_*, STORE_* */
export function packSandbox(options: PackSandboxOptions): Promise<PackedSandbox> {
  const { sandbox: sandboxName, name, store: url, folders, ...rest } = options;
  return withKeptSandbox(
    sandboxName,
    async (sandbox) => {
      const store = await openStore(url ?? sandbox.store);
      // By digest: the names may have come to mean other images since.
      const open = (reference: { readonly digest: string }) => openImage(store, reference.digest);
      const base = await open(sandbox.base);
      const workspace = sandbox.workspace === undefined ? undefined : await open(sandbox.workspace);
      const toolkits = await Promise.all(sandbox.toolkits.map(open));
      const lowers = composeLayers({ base, workspace, toolkits });
      const packed = await packDiff(store, {
        ...rest,
        name,
        upperDir: sandbox.upper,
        lowers,
        config: base.config,
        base: base.manifestDigest,
      });
      const composition = { base: sandbox.base, workspace: sandbox.workspace, toolkits: sandbox.toolkits };
      return { ...packed, composition };
    },
    folders,
  );
}
