/** Errors of sandboxes that an edge finds by itself, as its runtime would say them: whoever asks knows those. */
import { errorTable } from '#base';
import { runtimeErrors } from '#runtime';

export const failAsRuntime = errorTable(runtimeErrors);
