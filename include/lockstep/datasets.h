// SPDX-License-Identifier: Apache-2.0
// lockstep/datasets.h: the datasets that lockstep reads: Fashion-MNIST, NumPy, tokens, tensors, streams, shards of
// WebDataset. Images in folders are in lockstep/images.h.
//
// Flow:    files -> a Dataset -> lockstep/loader.h
// Owns:    a dataset owns its samples: in the dtype they are stored in, or as an open file
// Threads: datasets are const after construction; the functions may be called from any thread
// Ranks:   no communication; every rank opens the same files. One process writes a folder of shards
#pragma once

#include <functional>
#include <optional>

#include "lockstep/images.h"
#include "lockstep/sampler.h"

namespace lockstep {

class DataFile;

// ---- By name

struct DataSource {
  // "KIND[:PATH][?OPTION=VALUE&...]"; docs/data.md has the table of kinds and their options:
  //
  //   fashion-mnist[:DIR] | mnist:DIR | cifar-10:DIR | cifar-100:DIR
  //   imagefolder:DIR     DIR/train and DIR/val, or DIR/CLASS/... alone
  //   webdataset:DIR      DIR/train and DIR/val, or DIR alone; or TRAIN[,VALIDATION], such as t-{00..12}.tar
  //   csv:FILE    npy:DATA,TARGETS    text:FILE    synthetic:NxCxHxW
  std::string data;
  std::string folder{};   // the path where `data` has none
  std::string augment{};  // see parse_transforms; on top of the dataset's own normalisation, for training images alone
  // Set: the samples are for a model that was trained on data with these facts. They keep their order, none are held out unless
  // the kind has a validation part of its own or val= says so, and a table needs no target.
  std::optional<DataFacts> trained_on{};
};

// Training and validation data. Throws UsageError: no such kind or option, a path that is missing, `augment` without
// images; DataError from the readers, and: a class or a column that `trained_on` does not have.
Datasets open_dataset(const DataSource& source);
std::vector<std::string> dataset_kinds();

// ---- Images, as bytes in memory; floats exist only in batches

enum class Split { kTrain, kValidation };

// 60,000 + 10,000 images of clothes, 28 x 28 grey, 10 classes (Xiao, Rasul and Vollgraf, "Fashion-MNIST", 2017).
class FashionMNIST : public ImageDataset {
 public:
  static constexpr const char* kDebianFolder = "/usr/share/datasets/fashion-mnist";  // of dataset-fashion-mnist
  static ImageTransforms normalised();  // to mean 0 and deviation 1 over the training set

  // Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte, with or without .gz. Throws DataError: a file that read_idx
  // refuses, counts that disagree between images and labels, a label out of range.
  // A batch's data: (B, 1, 28, 28) float32, unless the transforms say otherwise; target: (B) int64.
  explicit FashionMNIST(const std::filesystem::path& folder = kDebianFolder, Split split = Split::kTrain,
                        const ImageTransforms& transforms = normalised());
};

// ---- Rows of tensors

class TensorDataset : public AssembledDataset {
 public:
  using More = std::map<std::string, Tensor>;
  // data, target and each of `more`: (N, ...), on the CPU. Throws DataError: no rows, or not as many of each.
  TensorDataset(std::string name, const Tensor& data, const Tensor& target, More more = {});

  std::string name() const override { return name_; }
  int64_t size() const override { return data_.size(0); }
  int64_t classes() const override;  // the largest target + 1, of (N) whole numbers
  const Tensor& data() const { return data_; }
  const More& more() const { return more_; }
  const Tensor& target() const { return target_; }

  // Floating-point numbers and bytes become float32, other whole numbers int64; bytes in targets become int64 too. Those of
  // `more` keep their dtype.
  Batch assemble(const BatchRequest& request) const override;

 private:
  std::string name_;
  Tensor data_;
  Tensor target_;
  More more_;
};

// Samples [begin, end) of another dataset.
class SubsetDataset : public AssembledDataset {
 public:
  SubsetDataset(DatasetPtr whole, int64_t begin, int64_t end);  // throws UsageError
  std::string name() const override { return whole_->name(); }
  int64_t size() const override { return end_ - begin_; }
  int64_t classes() const override { return whole_->classes(); }
  const Dataset& whole() const { return *whole_; }
  int64_t begin() const { return begin_; }
  Batch assemble(const BatchRequest& request) const override;
  void will_read(Indices indices) const override { whole_->will_read(in_whole(indices)); }

 private:
  std::vector<int64_t> in_whole(Indices indices) const;
  DatasetPtr whole_;
  int64_t begin_;
  int64_t end_;
};

inline constexpr uint64_t kMostUnpacked = uint64_t{16} << 30;

// An IDX file of the MNIST family (LeCun, Cortes and Burges, "The MNIST database"), plain or gzipped: a uint8 tensor of
// the file's shape. Memory grows with what is read, not with what the header promises. Throws DataError naming the file
// and the offset: missing, not IDX, another type, truncated, too long, damaged compression, more than most_bytes.
Tensor read_idx(const std::filesystem::path& path, uint64_t most_bytes = kMostUnpacked);

// A NumPy array (NEP 1), contiguous, of the file's shape and dtype. Nothing of the file is executed: Python objects and
// structures are refused. Throws DataError naming the file: missing, not .npy, a dtype that torch does not have,
// truncated, too long.
Tensor read_npy(const std::filesystem::path& path);

struct TableOptions {
  std::string target{};  // the column to predict; empty: the last one
  bool numbers = false;  // its whole numbers are quantities, not classes
  char separator = ',';
  std::vector<std::string> classes{};  // names of the target's classes, if they are known; empty: found in the table
  int64_t inputs = 0;                  // a table of so many columns has no target; 0: each has one
};

struct Table {
  Tensor data;                       // (N, columns) float32
  Tensor target;                     // (N) int64 classes, or (N, 1) float32; without a target (N) int64 of -100
  std::vector<std::string> columns;  // names of those of `data`; empty: the first line has none
  std::vector<std::string> classes;  // their names, in their order, where the column has texts
};

// A table as text (RFC 4180). The first line has the columns' names, unless every column but the last has a number there.
// A target of texts becomes classes in the order of their names; whole numbers from 0 are classes, too; other numbers are to be
// predicted themselves. Throws DataError naming line and column: not a number, missing, too few columns; UsageError: no such column.
Table read_csv(const std::filesystem::path& path, const TableOptions& options = {});

// ---- Text

struct TokenOptions {
  int64_t block = 128;     // tokens of a sample
  int token_bytes = 1;     // 1: every byte is a token, of 256; 2 or 4: little-endian numbers, as tokenisers write them
  int64_t vocabulary = 0;  // tokens are below it; 0: 256 for bytes, else not checked
  double skip = 0;         // share of the file to leave out at its beginning
  double leave = 0;        // and at its end
};

// Text as tokens, for models that predict the next one. Each batch is read from the file: it may be larger than memory.
class TokenDataset : public AssembledDataset {
 public:
  // Throws DataError: unreadable, not a whole number of tokens, fewer than block + 1; UsageError: options that make no
  // sense.
  explicit TokenDataset(const std::filesystem::path& path, const TokenOptions& options = {});

  std::string name() const override;
  int64_t size() const override { return samples_; }
  int64_t classes() const override { return options_.vocabulary; }

  // Sample i is block i of the text. data: (B, block) int64; target: (B, block) int64, the tokens one further on.
  // Throws DataError naming a token that is not in the vocabulary.
  Batch assemble(const BatchRequest& request) const override;

 private:
  int64_t token(const uint8_t* bytes, int64_t place) const;

  std::shared_ptr<const DataFile> file_;
  TokenOptions options_;
  int64_t first_ = 0;  // this dataset's first token
  int64_t samples_ = 0;
};

// ---- Streams

// Samples that can't be asked for by number, such as those of a socket, a decoder or a simulation. They are read one
// after another; those that other ranks and workers take, or that came before a resume, are dropped. The order is the
// stream's: the loader does not shuffle it. A sample that throws DataError may be skipped (skip_bad): the stream's next
// call goes on behind it.
class IterableDataset : public AssembledDataset {
 public:
  // Returns the next sample, whose tensors have no dimension B; nothing at the end. Used by one thread at a time.
  using Stream = std::function<std::optional<Batch>()>;
  // Returns a new stream from an epoch's first sample on, the same on every rank. Several threads may call it.
  using Open = std::function<Stream(int64_t epoch)>;

  // samples: of an epoch; what a stream has beyond them is not read. Throws UsageError: none, or no `open`.
  IterableDataset(std::string name, int64_t samples, Open open);

  std::string name() const override;
  int64_t size() const override;
  SampleOrderPtr shuffled_order() const override;

  // Throws DataError: samples differ in shape; UsageError: `open` returns nothing, a stream ends too early, or indices
  // do not rise. An index that all open streams have passed costs a new one, read from its first sample on.
  Batch assemble(const BatchRequest& request) const override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// ---- Shards of WebDataset, for data larger than memory (docs/data.md says what they hold)

struct PackOptions {
  uint64_t shard_bytes = uint64_t{256} << 20;
  bool keep_order = false;  // false: samples are written in random order, because folders list samples class by class
};

// Writes every sample of images or tensors as it is stored, without transforms. Throws UsageError: another kind of
// dataset, a folder that holds shards already; SystemError: a full disk; what the dataset and the decoder throw.
void pack(const Dataset& dataset, const std::filesystem::path& folder, const PackOptions& options = {});

}  // namespace lockstep
