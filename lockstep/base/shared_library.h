// SPDX-License-Identifier: Apache-2.0
// base/shared_library.h: a library that is loaded when it is needed, so that neither the build nor the wheel depends on
// it.
//
// Owns:    nothing: what is loaded stays until the process ends
// Threads: make it on one
#pragma once

#include <dlfcn.h>

namespace lockstep {

class SharedLibrary {
 public:
  explicit SharedLibrary(const char* name)
      : handle_(::dlopen(name, RTLD_NOW | RTLD_LOCAL)), is_complete_(handle_ != nullptr) {}

  // Becomes the pointer to a function that it initialises.
  struct Symbol {
    void* address;

    template <class Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };
  Symbol find(const char* function) {
    void* const address = handle_ == nullptr ? nullptr : ::dlsym(handle_, function);
    is_complete_ = is_complete_ && address != nullptr;
    return {address};
  }

  // False: there is no such library, or it lacks a function that was looked for.
  bool is_complete() const { return is_complete_; }

 private:
  void* handle_;
  bool is_complete_;
};

}  // namespace lockstep
