// SPDX-License-Identifier: Apache-2.0
#include "lockstep/datasets.h"

#include <cstring>
#include <limits>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/formats/data_file.h"
#include "lockstep/data/loader/batch_memory.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

void check_tokens(const TokenOptions& o) {
  const bool bytes_known = o.token_bytes == 1 || o.token_bytes == 2 || o.token_bytes == 4;
  if (o.block < 1 || !bytes_known || o.vocabulary < 0 || o.skip < 0 || o.leave < 0 || o.skip + o.leave >= 1)
    throw UsageError({.what = concat("blocks of ", o.block, " tokens of ", o.token_bytes, " bytes"),
                      .next = "give a block of at least 1, and tokens of 1, 2 or 4 bytes"});
}

}  // namespace

TokenDataset::TokenDataset(const fs::path& path, const TokenOptions& options)
    : file_(std::make_shared<DataFile>(path)), options_(options) {
  check_tokens(options);
  if (options_.vocabulary == 0)
    options_.vocabulary = options.token_bytes == 1 ? 256 : std::numeric_limits<int64_t>::max();
  const auto bytes = to_int64(file_->size());
  if (bytes % options.token_bytes != 0)
    throw DataError({.what = concat(bytes, " bytes, not a whole number of tokens of ", options.token_bytes, " bytes"),
                     .here = path.string(),
                     .likely = "a cut file, or tokens of another size"});
  const int64_t all = bytes / options.token_bytes;
  first_ = static_cast<int64_t>(to_double(all) * options.skip);
  const auto end = all - static_cast<int64_t>(to_double(all) * options.leave);
  samples_ = (end - first_ - 1) / options.block;  // the last token is only ever a target
  if (samples_ < 1)
    throw DataError({.what = concat(end - first_, " tokens, a sample needs ", options.block + 1),
                     .here = path.string(),
                     .next = "choose a smaller block"});
}

std::string TokenDataset::name() const { return file_->path().filename().string(); }

// The token that is stored at `bytes`, at `place` in the file.
int64_t TokenDataset::token(const uint8_t* bytes, int64_t place) const {
  uint32_t value = 0;
  // Little-endian, like every machine that libtorch runs on.
  std::memcpy(&value, bytes, to_size(options_.token_bytes));
  if (value >= options_.vocabulary)
    throw DataError({.what = concat("token ", value, " is not below the vocabulary's ", options_.vocabulary),
                     .here = concat(file_->path().string(), ", token ", place),
                     .likely = "tokens of another tokeniser, or of another size"});
  return value;
}

Batch TokenDataset::assemble(const BatchRequest& request) const {
  const auto samples = std::ssize(request.indices);
  Batch batch{allocate_for_batch(request.memory, {samples, options_.block}, torch::kInt64),
              allocate_for_batch(request.memory, {samples, options_.block}, torch::kInt64)};
  auto* data = batch.data.data_ptr<int64_t>();
  auto* target = batch.target.data_ptr<int64_t>();
  Bytes stored(to_size((options_.block + 1) * options_.token_bytes));
  for (const int64_t index : request.indices) {
    const int64_t begin = first_ + index * options_.block;
    file_->read(to_size(begin * options_.token_bytes), stored);
    for (int64_t i = 0; i < options_.block; ++i) *data++ = token(&stored[to_size(i * options_.token_bytes)], begin + i);
    target = std::copy_n(data - options_.block + 1, options_.block - 1, target);
    *target++ = token(&stored[to_size(options_.block * options_.token_bytes)], begin + options_.block);
  }
  return batch;
}

}  // namespace lockstep
