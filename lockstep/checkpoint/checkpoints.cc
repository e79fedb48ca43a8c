// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoints.h"

#include "lockstep/base/text.h"
#include "lockstep/checkpoint/checkpoint_writer.h"
#include "lockstep/error.h"

namespace lockstep {

Checkpoints::Checkpoints(const std::filesystem::path& folder, std::optional<int64_t> after)
    : writer_(std::make_unique<CheckpointWriter>(CheckpointFolder(folder))) {
  if (after) writer_->folder().go_back(*after);
}

Checkpoints::~Checkpoints() = default;

std::optional<std::filesystem::path> Checkpoints::newest() const {
  const auto found = writer_->folder().load_newest();
  return found ? std::optional(found->path) : std::nullopt;
}

void Checkpoints::save(int64_t step, const TensorFile& file) { writer_->save(step, file); }

void Checkpoints::finish(int64_t step, std::chrono::milliseconds timeout) {
  if (writer_->finish(step, timeout)) return;
  const std::string why = writer_->trouble();
  throw CheckpointError({.what = concat("the checkpoint of step ", step, " is not saved", why.empty() ? "" : ": ", why),
                         .likely = "a disk that is full or does not answer",
                         .next = "make room, and save again"});
}

}  // namespace lockstep
