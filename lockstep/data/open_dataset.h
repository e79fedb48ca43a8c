// data/open_dataset.h: datasets as --data names them.
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
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep {

struct DataSource {
  std::string data;       // as above
  std::string folder{};   // where the name has no path of its own
  std::string augment{};  // data/parse_transforms.h, on top of the dataset's own normalisation; for training images alone
};

struct TrainAndValidation {
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> validation;  // null: there is none
};

std::vector<std::string> dataset_kinds();

// Throws UsageError: no such kind or option, a path that is missing, --augment without images; DataError from the readers.
TrainAndValidation open_dataset(const DataSource& source);

}  // namespace lockstep
