// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/backend_work.h"

namespace lockstep::backend {

std::exception_ptr failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace lockstep::backend
