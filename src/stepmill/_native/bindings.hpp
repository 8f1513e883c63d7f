// What each file of the extension adds to the module; module.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace stepmill {

void bind_codec(nanobind::module_& module);   // encode, decode
void bind_system(nanobind::module_& module);  // watch_parent, usable_cores
void bind_reaper(nanobind::module_& module);  // Reaper; after the class Slab is bound

}  // namespace stepmill
