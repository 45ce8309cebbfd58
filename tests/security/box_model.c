/* A library that tries to get out as soon as it is loaded: its process ends with 17 if nothing that BOX_ACTS names could be done. */
#define main acts_main
#include "box_acts.c"
#undef main

__attribute__((constructor)) static void loaded(void) {
  const char *acts[] = {BOX_ACTS};
  for (size_t i = 0; i < sizeof acts / sizeof *acts; i += 2)
    if (act(acts[i], acts[i + 1]) == 0) _exit(18);
  _exit(17);
}
