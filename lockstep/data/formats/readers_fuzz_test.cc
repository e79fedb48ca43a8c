// SPDX-License-Identifier: Apache-2.0
// Mutated real files of every format: a reader gives valid data or throws DataError; never a crash, a hang, or bytes
// that it did not read. Under AddressSanitizer in `make soak`.
#include <algorithm>
#include <fstream>
#include <numeric>
#include <random>

#include "lockstep/base/to_size.h"
#include "lockstep/data/formats/readers.h"
#include "lockstep/data/images/encoded_image.h"
#include "lockstep/loader.h"
#include "tests/data/files.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::rounds;
using testing::TempFolder;

using Content = std::string;
using Random = std::mt19937;

size_t below(Random& random, size_t bound) { return random() % bound; }

void mutate_once(Content& bytes, Random& random) {
  static constexpr unsigned char kInteresting[] = {0, 1, 7, 8, 127, 128, 254, 255};
  if (bytes.empty()) return bytes.push_back(static_cast<char>(random()));
  const size_t at = below(random, bytes.size());
  const size_t length = 1 + below(random, std::min<size_t>(16, bytes.size() - at));
  switch (random() % 7) {
    case 0: bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8)); break;
    case 1: bytes[at] = static_cast<char>(kInteresting[below(random, sizeof kInteresting)]); break;
    case 2: bytes.resize(at); break;
    case 3: bytes.erase(at, length); break;
    case 4: bytes.insert(at, bytes, below(random, bytes.size()), length); break;
    case 5: bytes.insert(at, length, static_cast<char>(random())); break;
    default: std::fill_n(bytes.begin() + static_cast<ptrdiff_t>(at), length, static_cast<char>(random())); break;
  }
}

Content mutated(Content bytes, Random& random) {
  for (size_t i = 1 + below(random, 4); i > 0; --i) mutate_once(bytes, random);
  // Headers decide most.
  if (random() % 2 == 0 && !bytes.empty())
    bytes[below(random, std::min<size_t>(bytes.size(), 128))] = static_cast<char>(random());
  return bytes;
}

uint64_t sum_of(const torch::Tensor& tensor) {
  const torch::Tensor values = tensor.contiguous();
  const auto* bytes = static_cast<const uint8_t*>(values.const_data_ptr());
  return std::accumulate(bytes, bytes + values.nbytes(), uint64_t{0});
}

uint64_t sum_of(const Dataset& dataset) {
  const Batch batch = dataset.make_batch(testing::first_indices(std::min<int64_t>(dataset.size(), 8)));
  return sum_of(batch.data) + sum_of(batch.target);
}

// Reads mutations of `original`. `read` returns a sum over all it gives; the same file must give the same sum twice,
// which memory that was never written hardly does.
template <class Read>
void fuzz(const Content& original, int usual, Read&& read) {
  Random random(static_cast<unsigned>(original.size()));
  int refused = 0;
  const int all = rounds("LOCKSTEP_FUZZ_ROUNDS", usual);
  for (int round = 0; round < all; ++round) {
    const Content bytes = mutated(original, random);
    try {
      const uint64_t once = read(bytes);
      ASSERT_EQ(read(bytes), once) << "round " << round;
    } catch (const DataError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
}

template <class Read>
void fuzz_file(const TempFolder& folder, const std::string& name, int usual, Read&& read) {
  const Content original = read_file(folder / name);
  fuzz(original, usual, [&](const Content& bytes) {
    std::filesystem::remove(folder / name);  // a file that is written over is flushed to the disk
    std::ofstream(folder / name, std::ios::binary) << bytes;
    return read();
  });
}

// Decodes a random part to a random size, into memory that held something else before.
uint64_t decode(const Content& file) {
  static uint8_t rubbish = 0;
  const std::span bytes(reinterpret_cast<const uint8_t*>(file.data()), file.size());
  const ImageShape shape = encoded_shape(bytes, "fuzz");
  if (shape.values() > (1 << 22)) return 0;  // valid, and slow
  Random random(static_cast<unsigned>(file.size()));
  const auto part = [&](int64_t limit) { return 1 + static_cast<int64_t>(random() % static_cast<unsigned>(limit)); };
  Placement placement{.box = {0, 0, static_cast<double>(part(shape.width)), static_cast<double>(part(shape.height))}};
  placement.height = part(64);
  placement.width = part(64);
  DecodeScratch scratch(1 << 16, ++rubbish);
  const ImageView view = decode_image(bytes, placement, scratch);
  return std::accumulate(view.pixels, view.pixels + view.shape.values(), uint64_t{0});
}

TEST(Fuzz, jpeg) {
  const auto pixels = testing::smooth_pixels(40, 56, 1);
  const auto file = testing::encode_jpeg(pixels, 40, 56, 80);
  fuzz({file.begin(), file.end()}, 2000, decode);
}

TEST(Fuzz, png) {
  const auto file = testing::encode_png(testing::smooth_pixels(20, 30, 2), 20, 30);
  fuzz({file.begin(), file.end()}, 2000, decode);
}

TEST(Fuzz, npy) {
  const TempFolder folder;
  write_file(folder / "f.npy", testing::npy_text("<f4", "(2, 3)", std::string(24, 'x')));
  fuzz_file(folder, "f.npy", 3000, [&] { return sum_of(read_npy(folder / "f.npy")); });
}

TEST(Fuzz, csv) {
  const TempFolder folder;
  write_file(folder / "f.csv", "a,\"b\",kind\n1,2.5,0\n-3,4e2,1\n5,6,0\n");
  fuzz_file(folder, "f.csv", 3000, [&] {
    const Table table = read_csv(folder / "f.csv");
    return sum_of(table.data) + sum_of(table.target);
  });
}

TEST(Fuzz, cifar) {
  const TempFolder folder;
  write_file(folder / "test_batch.bin", std::string(3073 * 2, '\x05'));
  fuzz_file(folder, "test_batch.bin", 300,
            [&] { return sum_of(ImageDataset(read_cifar_files("cifar-10", folder.path(), Split::kValidation), {})); });
}

TEST(Fuzz, tokens) {
  const TempFolder folder;
  write_file(folder / "f.bin", std::string(64, '\x01'));
  fuzz_file(folder, "f.bin", 300, [&] {
    return sum_of(TokenDataset(folder / "f.bin", {.block = 4, .token_bytes = 2, .vocabulary = 60000}));
  });
}

class FuzzShards : public ::testing::Test {
 protected:
  FuzzShards() {
    const TensorDataset original("numbers", torch::arange(40, torch::kInt32).reshape({20, 2}), torch::arange(20));
    pack(original, folder / "p");
  }
  uint64_t read() const { return sum_of(*open_dataset({.data = "webdataset:" + folder.file("p")}).train); }
  TempFolder folder;
};

TEST_F(FuzzShards, shard) {
  fuzz_file(folder, "p/00000.tar", 500, [&] { return read(); });
}

TEST_F(FuzzShards, description) {
  fuzz_file(folder, "p/shards.json", 500, [&] { return read(); });
}

// A whole epoch over a folder in which every image was mutated: all that is bad is left out.
TEST(Fuzz, an_epoch_over_damaged_images_ends) {
  Random random(5);
  for (int round = rounds("LOCKSTEP_FUZZ_ROUNDS", 0) / 100; round >= 0; --round) {
    const TempFolder folder;
    testing::write_image_folder(folder.path(), 4);
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
      if (entry.is_regular_file()) {
        const Content bytes = mutated(read_file(entry.path()), random);
        std::ofstream(entry.path(), std::ios::binary) << bytes;
      }
    const auto dataset =
        std::make_shared<ImageDataset>(std::make_shared<ImageFolder>(folder.path()),
                                       ImageTransforms{.height = 8, .width = 8, .crop = Crop::kRandomResized});
    Loader loader(World::single(), dataset, {.batch_size = 3, .workers = 2, .skip_bad = 8});
    for (const Batch& batch : loader.epoch(round)) EXPECT_TRUE(torch::isfinite(batch.data).all().item<bool>());
    EXPECT_EQ(loader.statistics().samples + loader.statistics().skipped, 8);
  }
}

}  // namespace
}  // namespace lockstep
