// lockstep/datasets.h: the datasets that lockstep reads: Fashion-MNIST, CIFAR, IDX, CSV, NumPy, tokens, tensors, packed records.
#pragma once

#include <torch/types.h>

#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/data/formats/mapped_file.h"
#include "lockstep/data/packed/packed_records.h"
#include "lockstep/dataset.h"
#include "lockstep/images.h"

// ---- samples that are rows of tensors in memory, kept in the dtype they came in.
//
// Owns:    the tensors
// Threads: const after construction

namespace lockstep {

class TensorDataset : public Dataset {
 public:
  // data: (N, ...), target: (N, ...), on the CPU. Throws DataError: no rows, or not as many targets as rows.
  TensorDataset(std::string name, const torch::Tensor& data, const torch::Tensor& target);

  std::string name() const override { return name_; }
  std::int64_t size() const override { return data_.size(0); }
  const torch::Tensor& data() const { return data_; }
  const torch::Tensor& target() const { return target_; }

  // Floating-point numbers and bytes become float32, other whole numbers int64; bytes in targets become int64 too.
  Batch make_batch(std::span<const std::int64_t> indices) const override { return assemble({.indices = indices}); }
  Batch assemble(const BatchRequest& request) const override;

 private:
  std::string name_;
  torch::Tensor data_;
  torch::Tensor target_;
};

// Samples [begin, end) of another dataset.
class SubsetDataset : public Dataset {
 public:
  SubsetDataset(std::shared_ptr<const Dataset> whole, std::int64_t begin, std::int64_t end);  // throws UsageError
  std::string name() const override { return whole_->name(); }
  std::int64_t size() const override { return end_ - begin_; }
  const Dataset& whole() const { return *whole_; }
  std::int64_t begin() const { return begin_; }
  Batch make_batch(std::span<const std::int64_t> indices) const override { return assemble({.indices = indices}); }
  Batch assemble(const BatchRequest& request) const override;
  void will_read(std::span<const std::int64_t> indices) const override { whole_->will_read(in_whole(indices)); }

 private:
  std::vector<std::int64_t> in_whole(std::span<const std::int64_t> indices) const;
  std::shared_ptr<const Dataset> whole_;
  std::int64_t begin_;
  std::int64_t end_;
};

}  // namespace lockstep

// ---- 60,000 + 10,000 images of clothes, 28 x 28 grey, 10 classes.
//
// Source:  Xiao, Rasul and Vollgraf, "Fashion-MNIST" (2017), as Debian packages it: dataset-fashion-mnist. S0.
// Owns:    the images as bytes (45 MiB); float only exists in batches
// Threads: const after construction

namespace lockstep {

enum class Split { kTrain, kValidation };

class FashionMNIST : public ImageDataset {
 public:
  static constexpr const char* kDebianFolder = "/usr/share/datasets/fashion-mnist";
  static constexpr int kClasses = 10;
  static ImageTransforms normalised();  // to mean 0 and deviation 1 over the training set

  // Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte, with or without .gz. Throws DataError: a file that read_idx
  // refuses, counts that disagree between images and labels, a label out of range.
  // A batch's data: (B, 1, 28, 28) float32, unless the transforms say otherwise; target: (B) int64.
  explicit FashionMNIST(const std::filesystem::path& folder = kDebianFolder, Split split = Split::kTrain,
                        const ImageTransforms& transforms = normalised());
};

// The images of any dataset in the MNIST family's files: MNIST, KMNIST, EMNIST's digits, Fashion-MNIST.
std::shared_ptr<const ImageSource> read_mnist_files(const std::string& name, const std::filesystem::path& folder,
                                                    Split split, int classes);

}  // namespace lockstep

// ---- CIFAR-10 and CIFAR-100: 50,000 + 10,000 colour images of 32 x 32, in their binary version.
//
// Source:  Krizhevsky, "Learning multiple layers of features from tiny images" (2009). A record is the label
// (CIFAR-100:
//          the coarse one of 20, then the fine one of 100) and 3072 bytes, red plane, green plane, blue plane.
// Owns:    the images as bytes (146 MiB)
// Threads: const after construction

namespace lockstep {

class CIFAR10 : public ImageDataset {
 public:
  static ImageTransforms normalised();
  // Reads data_batch_1.bin ... data_batch_5.bin or test_batch.bin. A batch's data: (B, 3, 32, 32) float32.
  // Throws DataError: a file that is missing, empty or no whole number of records, a label out of range.
  explicit CIFAR10(const std::filesystem::path& folder, Split split = Split::kTrain,
                   const ImageTransforms& transforms = normalised());
};

class CIFAR100 : public ImageDataset {
 public:
  static ImageTransforms normalised();
  // Reads train.bin or test.bin; the target is the fine label.
  explicit CIFAR100(const std::filesystem::path& folder, Split split = Split::kTrain,
                    const ImageTransforms& transforms = normalised());
};

}  // namespace lockstep

// ---- reads the IDX format of the MNIST family, plain or gzipped.
//
// The format (LeCun, Cortes and Burges, "The MNIST database"): two zero bytes, a type byte (8: unsigned byte), the
// number of dimensions, each dimension as a big-endian 32-bit number, then the values, last dimension fastest.
//
// Threads: any
// Ranks:   no communication

namespace lockstep {

// The whole file as a uint8 tensor of the file's shape. Memory grows with what really arrives, not with what the header
// promises. Throws DataError naming the file and the offset: not there, not IDX, another type, truncated, too long,
// damaged compression.
torch::Tensor read_idx(const std::filesystem::path& path);

}  // namespace lockstep

// ---- tables of numbers in CSV files (RFC 4180; libcsv reads them).
//
// Threads: any

namespace lockstep {

struct CsvOptions {
  std::string target{};  // the column to predict: its name, or its number from 0; empty: the last one
  bool classes = true;   // the target is a class: a whole number >= 0; else any number
  char delimiter = ',';
};

struct CsvTable {
  std::vector<std::string> names;  // of the columns; "0", "1", ... in a file without a line of names
  torch::Tensor values;            // (rows, columns) float32
};

// The first line gives the names if any of its fields is not a number. Throws DataError naming line and column: a field
// that is empty or not a number, a line with more or fewer fields than the first, no line at all.
CsvTable read_csv(const std::filesystem::path& path, char delimiter = ',');

// data: (B, columns - 1) float32; target: (B) int64, or float32 where it is no class. Throws DataError, also for a
// target that is no class, and UsageError for a column that is not there.
std::shared_ptr<const TensorDataset> csv_dataset(const std::filesystem::path& path, const CsvOptions& options = {});

}  // namespace lockstep

// ---- reads NumPy's .npy files, and .npz archives of them.
//
// The format (NEP 1, "A simple file format for NumPy arrays"): "\x93NUMPY", version 1.0 to 3.0, the length of a header,
// the header as a Python dictionary (descr, fortran_order, shape), then the values. Nothing of it is executed: Python
// objects and structures are refused.
//
// Threads: any

namespace lockstep {

// A tensor of the file's shape and dtype, contiguous. Throws DataError naming the file: not there, not .npy, a dtype
// that torch does not have, truncated, too long.
torch::Tensor read_npy(const std::filesystem::path& path);
torch::Tensor parse_npy(std::span<const std::uint8_t> bytes, const std::string& origin);

// Every array of the archive under its name. Memory grows with what really arrives. Throws DataError: not a zip
// archive, a damaged entry, an entry that read_npy would refuse.
std::map<std::string, torch::Tensor> read_npz(const std::filesystem::path& path);

}  // namespace lockstep

// ---- text as tokens, for models that predict the next one.
//
// Owns:    a mapping of the file: it may be larger than memory
// Threads: const after construction

namespace lockstep {

struct TokenOptions {
  std::int64_t block = 128;  // tokens of a sample
  int token_bytes = 1;  // 1: every byte is a token, of 256; 2 or 4: little-endian numbers, as tokenisers write them
  std::int64_t vocabulary = 0;  // tokens are below it; 0: 256 for bytes, else not checked
  double skip = 0;              // shares of the file that are not this dataset's: at its beginning
  double leave = 0;             // and at its end
};

class TokenDataset : public Dataset {
 public:
  // Throws DataError: unreadable, no whole number of tokens, fewer than block + 1; UsageError: options that make no
  // sense.
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

// ---- images out of a random generator: of any size, always the same, and to be learnt. For tests and
// benchmarks.

namespace lockstep {

struct SyntheticOptions {
  std::int64_t samples = 1024;
  ImageShape shape{3, 32, 32};
  std::int64_t classes = 10;
  std::uint64_t seed = 0;  // of the samples; the classes' patterns are the same for every seed
};

// Sample i is of class i modulo `classes`: the class's pattern, half covered by noise. Lies in memory as bytes.
// Throws UsageError: a number below 1.
std::shared_ptr<const ImageSource> synthetic_images(const SyntheticOptions& options);

}  // namespace lockstep

// ---- packed records as a dataset, and any other dataset as packed records.
//
// Flow:    pack() -> a folder of shards -> open_packed() -> lockstep/loader.h
// Threads: datasets are const after construction

namespace lockstep {

constexpr std::int64_t kPackedWindow = 16384;  // samples that are shuffled with each other

// Packed images, encoded or as bytes (C, H, W).
class PackedImages : public ImageSource {
 public:
  explicit PackedImages(std::shared_ptr<const RecordReader> records, std::int64_t window = kPackedWindow);

  std::string name() const override { return records_->info().name; }
  std::int64_t size() const override { return records_->size(); }
  std::int64_t channels() const override { return first_.channels; }
  std::int64_t classes() const override { return records_->info().classes; }
  ImageShape common_shape() const override { return first_; }
  StoredImage read(std::int64_t index, std::vector<std::uint8_t>& scratch) const override;
  void will_read(std::span<const std::int64_t> indices) const override { records_->will_read(indices); }
  std::string origin(std::int64_t index) const override { return records_->origin(index); }
  std::shared_ptr<const SampleOrder> shuffled_order() const override { return order_; }

 private:
  std::shared_ptr<const RecordReader> records_;
  std::shared_ptr<const SampleOrder> order_;
  ImageShape first_;
};

// Images become an ImageDataset with these transforms; other arrays of one shape a dataset that converts them as
// TensorDataset does. Shuffled, the shards come in random order, and samples are shuffled within windows.
// Throws what RecordReader throws; DataError: no records, or none that can be read.
std::shared_ptr<const Dataset> open_packed(const std::filesystem::path& folder, const ImageTransforms& transforms,
                                           std::int64_t window = kPackedWindow);

// What the records are like. Throws DataError: no records, or none that can be read.
Record first_good_record(const RecordReader& records);
bool holds_images(const RecordReader& records);

struct PackOptions {
  std::uint64_t shard_bytes = std::uint64_t{256} << 20;
  bool keep_order = false;        // else the records are written in a random order: classes lie side by side in folders
  std::int64_t shorter_edge = 0;  // encoded images are resized to it, if it is longer, and become JPEG; 0: as they are
  int quality = 90;               // of such a JPEG
};

// Writes every sample of images or tensors as it is stored, without transforms. Throws UsageError: another kind of
// dataset; what the dataset, RecordWriter and the decoder throw.
void pack(const Dataset& dataset, const std::filesystem::path& folder, const PackOptions& options = {});

}  // namespace lockstep

// ---- datasets as --data names them.
//
//   fashion-mnist[:DIR] | mnist:DIR | cifar-10:DIR | cifar-100:DIR
//   imagefolder:DIR     DIR/train and DIR/val, or DIR/CLASS/... alone
//   packed:DIR          DIR/train and DIR/val, or DIR alone, as lockstep data pack writes them
//   npy:DATA,TARGETS    npz:FILE (x and y, or the names of data= and target=)
//   csv:FILE            text:FILE (bytes), or with bits=16 or bits=32 the tokens of a tokeniser
//   synthetic:NxCxHxW
//
// Options follow behind "?", with "&" between them: csv:wine.csv?target=quality&val=0.1
//   val=SHARE           of npy, npz, csv, text and synthetic data: the last part is for validation
//   target=COLUMN, classes=0, delimiter=;      csv
//   data=NAME, target=NAME                     npz
//   block=TOKENS, bits=8|16|32, vocabulary=N   text
//   classes=N                                  npy, npz, synthetic
//   window=N                                   packed
//
// Threads: any

namespace lockstep {

struct DataSource {
  std::string data;      // as above
  std::string folder{};  // where the name has no path of its own
  std::string
      augment{};  // lockstep/images.h, on top of the dataset's own normalisation; for training images alone
};

struct TrainAndValidation {
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> validation;  // null: there is none
};

std::vector<std::string> dataset_kinds();

// Throws UsageError: no such kind or option, a path that is missing, --augment without images; DataError from the
// readers.
TrainAndValidation open_dataset(const DataSource& source);

}  // namespace lockstep
