// SPDX-License-Identifier: Apache-2.0
#include "lockstep/error.h"

#include <cerrno>
#include <cstring>
#include <utility>

namespace lockstep {
namespace {

void append_part(std::string& message, const char* label, const std::string& text) {
  if (!text.empty()) message.append("\n  ").append(label).append(text);
}

}  // namespace

Error::Error(std::string kind, ErrorText text) : kind_(std::move(kind)), text_(std::move(text)) {
  message_ = "lockstep: " + kind_ + ": " + text_.what;
  append_part(message_, "here:   ", text_.here);
  append_part(message_, "peer:   ", text_.peer);
  append_part(message_, "likely: ", text_.likely);
  append_part(message_, "next:   ", text_.next);
}

SystemError system_error(const std::string& doing, const std::string& subject) {
  const std::string reason = std::strerror(errno);
  return SystemError({.what = "can't " + doing + " " + subject + ": " + reason, .here = subject});
}

}  // namespace lockstep
