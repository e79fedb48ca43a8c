// data/tokens.h: text as tokens, for models that predict the next one.
//
// Owns:    a mapping of the file: it may be larger than memory
// Threads: const after construction
#pragma once

#include <filesystem>
#include <memory>

#include "lockstep/data/dataset.h"
#include "lockstep/data/mapped_file.h"

namespace lockstep {

struct TokenOptions {
  std::int64_t block = 128;  // tokens of a sample
  int token_bytes = 1;       // 1: every byte is a token, of 256; 2 or 4: little-endian numbers, as tokenisers write them
  std::int64_t vocabulary = 0;  // tokens are below it; 0: 256 for bytes, else not checked
  double skip = 0;           // shares of the file that are not this dataset's: at its beginning
  double leave = 0;          // and at its end
};

class TokenDataset : public Dataset {
 public:
  // Throws DataError: unreadable, no whole number of tokens, fewer than block + 1; UsageError: options that make no sense.
  explicit TokenDataset(const std::filesystem::path& path, const TokenOptions& options = {});

  std::string name() const override { return file_->path().filename().string(); }
  std::int64_t size() const override { return samples_; }
  const TokenOptions& options() const { return options_; }

  // Sample i is block i of the text. data: (B, block) int64; target: (B, block) int64, the tokens one further on.
  // Throws DataError naming a token that is not in the vocabulary.
  Batch make_batch(std::span<const std::int64_t> indices) const override { return assemble({.indices = indices}); }
  Batch assemble(const BatchRequest& request) const override;

 private:
  std::int64_t token(std::int64_t place) const;
  void write_sample(std::int64_t index, std::int64_t* data, std::int64_t* target) const;

  std::shared_ptr<const MappedFile> file_;
  TokenOptions options_;
  std::int64_t first_ = 0;  // token of this dataset
  std::int64_t samples_ = 0;
};

}  // namespace lockstep
